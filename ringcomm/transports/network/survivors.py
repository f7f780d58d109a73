"""How ranks on several hosts continue without lost ranks: the survivors agree who they are, and connect anew."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ringcomm.bootstrap.arrivals import format_ranks
from ringcomm.bootstrap.membership import reconnect_timeout
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.shrink import start_name
from ringcomm.bootstrap.store import Store, job_store
from ringcomm.bootstrap.survivor import Survivor
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

        `group` is its name in this start; `members`, `lost`: see Survivor. Either all survivors return, or
        none does: if more are lost before all have confirmed that they are connected, the others agree again.
        """
        name, failure = f"{self.place.job}/{group}", None
        limit = reconnect_timeout(timeout)
        config = replace(self._config, start_timeout=limit)
        left_out: set[int] = set()
        keepalive = self._config.keepalive
        with Survivor(self.place, name, rank, range(size), members, lost, timeout, keepalive) as survivor:
            for _ in range(size):
                left, gone, attempt = survivor.agree()
                left_out |= {*range(size)} - {*left, *gone}
                if rank not in left:
                    others = f"{format_ranks(left)} had continued without it"
                    raise Aborted(f"rank {rank} was left out: it called shrink when {others}", rank=rank)
                place = replace(self.place, rank=left.index(rank), size=len(left), job=start_name(name, attempt))
                place = replace(place, members=tuple(members[each] for each in left if members))
                try:
                    with job_store(place, limit) as store:
                        transport = self._connect(place.rank, place.size, store, config)
                except (PeerLost, CollectiveTimeout, Aborted) as error:
                    log.info("rank %d connects again: %s", rank, error)
                    failure = error
                    survivor.fail(attempt)
                    continue
                try:
                    if survivor.confirm(attempt, limit):
                        return transport, left_out
                except BaseException:
                    transport.close()
                    raise
                transport.close()
        text = f"rank {rank} gave up after {size} attempts to connect the survivors; the last error: {failure}"
        raise PeerLost(text, rank=rank)
