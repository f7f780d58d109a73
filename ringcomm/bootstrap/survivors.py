"""How the survivors of a group on several hosts agree who is left of it: the launcher of node 0 decides.

    rank → server    shrink: the ranks of the group, those that this one knows to be lost, how long it waits
    server → rank    who is left: once every other rank has come or is lost, or the time of one that waits is over
    rank → server    connected, or failed: an attempt to connect those that are left
    server → rank    whether all are connected; otherwise all agree again

Meanwhile each rank reports those that it learns to be lost; its own end, and the end of its connection, count as its
loss. Once all that are left are connected, they have continued: whoever comes later is told by whom it was left out.
"""

import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.servedsurvivors import SURVIVORS
from ringcomm.bootstrap.tcpstore import TcpStore, broken
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["MembershipAgreement", "SurvivorsStore"]

POLL_INTERVAL = 0.02  # seconds between two looks at who is lost
ANSWER_TIMEOUT = 5.0  # seconds for an answer, after the time that the server keeps is over


class MembershipAgreement(NamedTuple):
    """Who is left. If this rank is not, the others have continued without it."""

    left: list[int]
    lost: Sequence[int] = ()  # the others run, but did not come
    attempt: int = 0  # to connect them


class SurvivorsStore(TcpStore):
    """The connection of a rank of a group. Each call raises PeerLost or CollectiveTimeout if the launcher is lost.

    Args:
        place: of this process
        group: a name that no other group of the job has
        rank: in the group
        ranks: all of the group
        members: the rank in the job of each, if the launchers end those that are left out; else empty
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
        super().__init__(replace(place, job=SURVIVORS), min(timeout + ANSWER_TIMEOUT, RECONNECT_TIMEOUT), keepalive)

    def agree(self) -> MembershipAgreement:
        """Return who is left."""
        return MembershipAgreement(**self._exchange("shrink", self._patience))

    def confirm(self, attempt: int, timeout: float) -> bool:
        """Return whether all that are left are connected within `timeout` seconds, as this rank is."""
        return bool(self._exchange("connected", timeout, attempt=attempt)["left"])

    def fail(self, attempt: int) -> None:
        """Say that this rank could not connect."""
        self._tell("failed", attempt=attempt, lost=[])

    def _exchange(self, kind: str, timeout: float, **more: object) -> Any:
        known = sorted(self._find_lost())
        self._tell(kind, lost=known, timeout=timeout, **more)
        limit = timeout + ANSWER_TIMEOUT
        end = time.monotonic() + limit
        self._socket.settimeout(POLL_INTERVAL)
        while True:
            over = time.monotonic() >= end
            try:
                return json.loads(self._answer("", timeout))
            except (BlockingIOError, TimeoutError):  # nothing, or half a message
                if over:
                    raise self._unreachable(limit, "the connection is open") from None
                if (now := sorted(self._find_lost())) != known:
                    known = now
                    self._tell("lost", lost=known)

    def _tell(self, kind: str, **more: object) -> None:
        self._send(f"{kind}\0{json.dumps({**self._request, **more})}".encode())

    def _join(self, connect: Callable[[float], socket.socket], identity: bytes, timeout: float) -> socket.socket:
        def connect_if_it_runs(seconds: float) -> socket.socket:
            try:
                return connect(seconds)
            except ConnectionRefusedError:  # it has listened since the job began
                raise self._lost(None) from None

        return super()._join(connect_if_it_runs, identity, timeout)

    def _lost(self, error: OSError | None) -> PeerLost:
        return PeerLost(self._without_server(broken(error)))

    def _unreachable(self, timeout: float, reason: str) -> CollectiveTimeout:
        return CollectiveTimeout(self._without_server(f"did not answer within {timeout:g} s ({reason})"))

    def _without_server(self, why: str) -> str:
        return f"{self._server_name} ({self._place.store}) {why}: without it shrink cannot tell who is left"
