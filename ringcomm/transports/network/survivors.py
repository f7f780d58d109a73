"""How ranks on several hosts continue without lost ones: they agree who survives, and connect anew.

The launcher of node 0 decides who survives: see bootstrap/shrink.py.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ringcomm.bootstrap.client import ANSWER_TIMEOUT, Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, reconnect_timeout
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import SHRINK
from ringcomm.bootstrap.shrink import Agreement, start_name
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.bootstrap.store import Store, await_connected, job_store
from ringcomm.config import Config
from ringcomm.errors import Aborted, CollectiveTimeout, PeerLost
from ringcomm.transports.contract import Transport

__all__ = ["Survivors"]

log = logging.getLogger("ringcomm")


class Survivors:
    """Connects the survivors of a start; `connect` is that of the transport."""

    def __init__(self, place: Place, config: Config, connect: Callable[[int, int, Store, Config], Transport]) -> None:
        self.place = place
        self._config, self._connect = config, connect

    def regroup(
        self,
        group: str,
        rank: int,
        size: int,
        members: Sequence[int],
        lost: Callable[[], Iterable[int]],
        timeout: float,
    ) -> tuple[Transport, set[int]]:
        """Connect the survivors of a group; return their transport, and the ranks that run but did not call.

        `group` is its name in this start; `members`, `lost`: see agree. Either all survivors return, or none
        does: if more are lost before all have confirmed that they are connected, the others agree again.
        """
        name, failure = f"{self.place.job}/{group}", None
        limit = reconnect_timeout(timeout)
        config = replace(self._config, start_timeout=limit)
        left_out_ranks: set[int] = set()
        with connect_to_launcher(self.place, timeout, self._config.keepalive) as client:
            for _ in range(size):
                agreed = agree(client, name, rank, range(size), members, lost, timeout)
                survivors = agreed.survivors
                left_out_ranks |= {*range(size)} - {*survivors, *agreed.lost}
                if rank not in survivors:
                    others = f"{format_ranks(survivors)} had continued without it"
                    raise Aborted(f"rank {rank} was left out: it called shrink when {others}", rank=rank)
                place = replace(
                    self.place,
                    rank=survivors.index(rank),
                    size=len(survivors),
                    job=start_name(name, agreed.attempt),
                    members=tuple(members[each] for each in survivors if members),
                )
                try:
                    with job_store(place, limit) as store, ExitStack() as failed:
                        transport = self._connect(place.rank, place.size, store, config)
                        failed.callback(transport.close)
                        await_connected(store, place.rank, place.size, limit)
                        failed.pop_all()
                    return transport, left_out_ranks
                except (PeerLost, CollectiveTimeout, Aborted) as error:
                    log.info("rank %d connects again: %s", rank, error)
                    failure = error
        text = f"rank {rank} gave up after {size} attempts to connect the survivors; the last error: {failure}"
        raise PeerLost(text, rank=rank)


def connect_to_launcher(place: Place, timeout: float, keepalive: float) -> Client:
    """Connect to the session in which a group agrees who survives, and which then waits so long for other ranks.

    This, and each call of the client, raises PeerLost or CollectiveTimeout if the launcher is lost.
    """
    suffix = ": without it shrink cannot tell who survives"
    launcher = replace(find_endpoint(place, keepalive), suffix=suffix, always_up=True)
    limit = min(timeout + ANSWER_TIMEOUT, RECONNECT_TIMEOUT)
    return Client(launcher, SHRINK, place, limit, patience=ANSWER_TIMEOUT)


def agree(
    client: Client,
    group: str,
    rank: int,
    ranks: Sequence[int],
    members: Sequence[int],
    find_lost: Callable[[], Iterable[int]],
    timeout: float,
) -> Agreement:
    """Return who survives.

    Args:
        client: see connect_to_launcher
        group: a name that no other group of the job has
        rank: in the group
        ranks: all of the group
        members: the rank in the job of each, if the launchers end ranks that are left out; else empty
        find_lost: returns the ranks that this one knows to be lost
        timeout: seconds to wait for ranks that run but do not come
    """
    known, request = set(find_lost()), {"group": group, "rank": rank, "ranks": [*ranks], "members": [*members]}

    def tell_of_more() -> None:
        if more := set(find_lost()) - known:
            known.update(more)
            client.tell("lost", **request, lost=sorted(more))

    fields = {**request, "lost": sorted(known), "timeout": timeout}
    return Agreement(**client.ask("shrink", timeout, tell_of_more, **fields).fields)
