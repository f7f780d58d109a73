"""How the ranks of a group on several hosts agree who survives: the launcher of node 0 decides.

    rank → server    shrink: the ranks of the group, the lost ones that this one knows of, how long it waits
    server → rank    the survivors: once every other rank has come or is lost, or the time of one that waits is over

Then the survivors connect, in a start that this server serves as well. Meanwhile each rank reports losses that it
learns of; its own end, and the end of its connection, count as its loss. Unless all survivors have connected, they
agree again. Once they have, they have continued: a rank that comes later learns who has left it out.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringcomm.bootstrap.session import BaseSession, Peer, Replies
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.wire.framing import Frame, encode
from ringcomm.errors import PeerLost

__all__ = ["Agreement", "Shrink", "left_out_key", "start_name"]


class Agreement(NamedTuple):
    """Who survives. If the rank that asks does not, the others have continued without it."""

    survivors: list[int]
    lost: Sequence[int] = ()  # the others run, but did not call shrink
    attempt: int = 0  # to connect them


def start_name(group: str, attempt: int) -> str:
    """Return the name of the start in which the survivors of a group connect."""
    return f"{group}.{attempt}"


def left_out_key(rank: int) -> str:
    """Return the key of the session of the members that tells the launchers to end a rank of the job."""
    return f"left_out/{rank}"


@dataclass
class _Regrouping:
    """A group that has lost ranks, and how its survivors go on."""

    name: str
    ranks: list[int]  # that may survive
    members: list[int]  # the rank in the job of each rank of the group, or empty
    attempt: int = 0
    peers: dict[Peer, int] = field(default_factory=dict)  # ranks that have come
    waiting: dict[Peer, tuple[int, float]] = field(default_factory=dict)  # their questions, and until when
    lost: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    survivors: list[int] = field(default_factory=list)  # as decided in this attempt
    connected: bool = False  # the survivors have continued

    @property
    def start(self) -> str:
        return start_name(self.name, self.attempt)

    def number(self, rank: int) -> int:
        """Return how errors name a survivor: see start_errors.py."""
        return self.members[rank] if self.members else self.survivors.index(rank)

    def forget(self, peer: Peer) -> int | None:
        """Return which rank of the group this was; its end is its loss."""
        self.waiting.pop(peer, None)
        rank = self.peers.pop(peer, None)
        if rank is not None:
            self.lost.add(rank)
        return rank

    def retry(self) -> None:
        """End an attempt: the survivors agree again."""
        self.ranks = [rank for rank in self.survivors if rank not in self.lost]
        self.survivors = []
        self.attempt += 1

    def decide(self) -> Replies:
        """Decide who survives, once all others have come or are lost, or it is time."""
        came = {self.peers[peer] for peer in self.waiting}
        late = self.due() <= time.monotonic()
        if self.survivors or not came or not (late or came.issuperset(set(self.ranks) - self.lost)):
            return []
        self.survivors = sorted(came)
        self.left_out |= set(self.ranks) - came - self.lost
        agreement = Agreement(self.survivors, sorted(self.lost), self.attempt)
        waiting, self.waiting = self.waiting, {}
        return [_answer(peer, number, agreement) for peer, (number, _) in waiting.items()]

    def due(self) -> float:
        return min((deadline for _, deadline in self.waiting.values()), default=math.inf)


class Shrink(BaseSession):
    """The session in which each group agrees who survives. It lasts until the job ends.

    `end_start` ends a start of so many ranks, with an error.
    """

    def __init__(self, end_start: Callable[[str, int, PeerLost], None]) -> None:
        super().__init__()
        self._groups: dict[str, _Regrouping] = {}
        self._end_start = end_start

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind not in ("shrink", "lost"):
            return super().take(peer, message)
        request = message.fields
        name, rank = str(request["group"]), int(request["rank"])
        group = self._groups.setdefault(name, _Regrouping(name, list(request["ranks"]), list(request["members"])))
        ranks = group.survivors or group.ranks
        if group.connected or rank not in ranks:  # it comes too late, or again
            others = Agreement([each for each in ranks if each != rank])
            return [_answer(peer, request["id"], others)] if message.kind == "shrink" else []
        group.peers[peer] = rank
        group.lost.update(request["lost"])
        if message.kind == "shrink":
            self._wait(group, peer, rank, request)
        return []

    def end(self, start: str) -> list[int]:
        """Note that the survivors have connected in this start; return the ranks of the job that they have left out."""
        for group in self._groups.values():
            if group.survivors and group.start == start and not group.connected:
                group.connected = True
                return [group.members[rank] for rank in sorted(group.left_out) if group.members]
        return []

    def leave(self, peer: Peer) -> Replies:
        """Also where a rank has given up: the others need not wait for it."""
        member = self.present.get(peer)
        for group in self._groups.values():
            rank = group.forget(peer)
            if member and rank in group.survivors and not group.connected:
                self._retry(group, lost_in_start(group.number(rank), member.process))
        return super().leave(peer)

    def due(self) -> float:
        """Return when to call `poll`."""
        return min((group.due() for group in self._groups.values()), default=math.inf)

    def poll(self) -> Replies:
        """Do what is due, or has become possible."""
        self._groups = {name: group for name, group in self._groups.items() if group.ranks}
        return [reply for group in self._groups.values() for reply in group.decide()]

    def _wait(self, group: _Regrouping, peer: Peer, rank: int, request: dict[str, Any]) -> None:
        if group.survivors:  # it has not connected with the others
            number = group.number(rank)
            self._retry(group, PeerLost(f"rank {number} called shrink again before all had connected", rank=number))
        group.lost.discard(rank)
        group.waiting[peer] = request["id"], time.monotonic() + float(request["timeout"])

    def _retry(self, group: _Regrouping, error: PeerLost) -> None:
        self._end_start(group.start, len(group.survivors), error)
        group.retry()


def _answer(peer: Peer, number: int, agreement: Agreement) -> tuple[Peer, bytes]:
    return peer, encode("agreed", id=number, **agreement._asdict())
