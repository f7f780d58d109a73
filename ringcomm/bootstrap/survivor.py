"""A rank that calls `shrink` on several hosts: its connection to the session in which the others agree who is left."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

from ringcomm.bootstrap.client import ANSWER_TIMEOUT, Client
from ringcomm.bootstrap.host import launcher
from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import SHRINK
from ringcomm.bootstrap.shrink import Agreement
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["Survivor"]


class Survivor:
    """Each call raises PeerLost or CollectiveTimeout if the launcher is lost.

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
        self._where = f"the launcher of node 0 ({place.store})"
        host = replace(
            launcher(place, keepalive),
            lost=lambda how: PeerLost(self._without_server(how)),
            unreachable=self._silent,
            silent=lambda seconds: self._silent(seconds, "the connection is open"),
            always_up=True,
        )
        self._client = Client(
            host, SHRINK, place, min(timeout + ANSWER_TIMEOUT, RECONNECT_TIMEOUT), patience=ANSWER_TIMEOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the others need not wait for this rank."""
        self._client.close()

    def agree(self) -> Agreement:
        """Return who is left."""
        return self._ask("shrink", self._patience)

    def confirm(self, attempt: int, timeout: float) -> bool:
        """Return whether all that are left are connected within `timeout` seconds, as this rank is."""
        return bool(self._ask("connected", timeout, attempt=attempt).left)

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

    def _silent(self, seconds: float, reason: str) -> CollectiveTimeout:
        return CollectiveTimeout(self._without_server(f"did not answer within {seconds:g} s ({reason})"))

    def _without_server(self, why: str) -> str:
        return f"{self._where} {why}: without it shrink cannot tell who is left"
