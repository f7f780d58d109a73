"""How ranks on several hosts continue without lost ones: they agree who survives, and connect anew.

The launcher of node 0 decides who survives: see bootstrap/shrink.py.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

from ringcomm.bootstrap.client import ANSWER_TIMEOUT, Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, reconnect_timeout
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import SHRINK
from ringcomm.bootstrap.shrink import Agreement, start_name
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.bootstrap.store import Store, job_store
from ringcomm.config import Config
from ringcomm.errors import Aborted, CollectiveTimeout, PeerLost
from ringcomm.transports.contract import Transport

__all__ = ["Survivor", "Survivors"]

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

        `group` is its name in this start; `members`, `lost`: see Survivor. Either all survivors return, or
        none does: if more are lost before all have confirmed that they are connected, the others agree again.
        """
        name, failure = f"{self.place.job}/{group}", None
        limit = reconnect_timeout(timeout)
        config = replace(self._config, start_timeout=limit)
        left_out_ranks: set[int] = set()
        keepalive = self._config.keepalive
        with Survivor(self.place, name, rank, range(size), members, lost, timeout, keepalive) as survivor:
            for _ in range(size):
                agreed = survivor.agree()
                left_out_ranks |= {*range(size)} - {*agreed.survivors, *agreed.lost}
                place = self._place_among(agreed, name, rank, members)
                try:
                    with job_store(place, limit) as store:
                        transport = self._connect(place.rank, place.size, store, config)
                except (PeerLost, CollectiveTimeout, Aborted) as error:
                    log.info("rank %d connects again: %s", rank, error)
                    failure = error
                    survivor.fail(agreed.attempt)
                    continue
                if _is_complete(transport, survivor, agreed.attempt, limit):
                    return transport, left_out_ranks
        text = f"rank {rank} gave up after {size} attempts to connect the survivors; the last error: {failure}"
        raise PeerLost(text, rank=rank)

    def _place_among(self, agreed: Agreement, name: str, rank: int, members: Sequence[int]) -> Place:
        """Return the place of this rank in the start of the survivors; raise Aborted if it is not one of them."""
        survivors = agreed.survivors
        if rank not in survivors:
            others = f"{format_ranks(survivors)} had continued without it"
            raise Aborted(f"rank {rank} was left out: it called shrink when {others}", rank=rank)
        return replace(
            self.place,
            rank=survivors.index(rank),
            size=len(survivors),
            job=start_name(name, agreed.attempt),
            members=tuple(members[each] for each in survivors if members),
        )


def _is_complete(transport: Transport, survivor: "Survivor", attempt: int, timeout: float) -> bool:
    """Return whether all survivors have confirmed that they are connected; else the transport is closed."""
    complete = False
    try:
        complete = survivor.confirm(attempt, timeout)
    finally:
        if not complete:
            transport.close()
    return complete


class Survivor:
    """The connection of a rank to the session in which its group agrees who survives.

    Each call raises PeerLost or CollectiveTimeout if the launcher is lost.

    Args:
        place: of this process
        group: a name that no other group of the job has
        rank: in the group
        ranks: all of the group
        members: the rank in the job of each, if the launchers end ranks that are left out; else empty
        lost: returns the ranks that this one knows to be lost
        timeout: seconds for which `agree` waits for ranks that run but do not come
        keepalive: seconds after which a server that does not answer is lost
    """

    def __init__(
        self,
        place: Place,
        group: str,
        rank: int,
        ranks: Sequence[int],
        members: Sequence[int],
        lost: Callable[[], Iterable[int]],
        timeout: float,
        keepalive: float,
    ) -> None:
        self._request = {"group": group, "rank": rank, "ranks": [*ranks], "members": [*members]}
        self._find_lost, self._patience = lost, timeout
        launcher = replace(
            find_endpoint(place, keepalive), suffix=": without it shrink cannot tell who survives", always_up=True
        )
        self._client = Client(
            launcher, SHRINK, place, min(timeout + ANSWER_TIMEOUT, RECONNECT_TIMEOUT), patience=ANSWER_TIMEOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the others need not wait for this rank."""
        self._client.close()

    def agree(self) -> Agreement:
        """Return who survives."""
        return self._ask("shrink", self._patience)

    def confirm(self, attempt: int, timeout: float) -> bool:
        """Return whether all survivors are connected within `timeout` seconds, as this rank is."""
        return bool(self._ask("connected", timeout, attempt=attempt).survivors)

    def fail(self, attempt: int) -> None:
        """Say that this rank could not connect."""
        self._client.tell("failed", **self._request, attempt=attempt, lost=[])

    def _ask(self, kind: str, timeout: float, **more: object) -> Agreement:
        known = set(self._find_lost())

        def tell_of_more() -> None:
            if more := set(self._find_lost()) - known:
                known.update(more)
                self._client.tell("lost", **self._request, lost=sorted(more))

        fields = {**self._request, "lost": sorted(known), "timeout": timeout, **more}
        return Agreement(**self._client.ask(kind, timeout, tell_of_more, **fields).fields)
