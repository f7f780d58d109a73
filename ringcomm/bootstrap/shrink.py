"""How the ranks of a group on several hosts agree who survives: the launcher of node 0 decides.

    rank → server    shrink: the ranks of the group, the lost ones that this one knows of, how long it waits
    server → rank    the survivors: once every other rank has come or is lost, or the time of one that waits is over
    rank → server    whether it has connected with the other survivors: see facts.confirm

Meanwhile each rank reports losses that it learns of; its own end, and the end of its connection, count as its loss.
Unless all survivors have connected, they agree again. Once they have, they have continued: a rank that comes later
learns who has left it out.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringcomm.bootstrap.session import CONNECTED, BaseSession, Peer, Replies, connected_key
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.wire.framing import Frame, encode
from ringcomm.errors import PeerLost, encode_error

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
    """A group that has lost ranks, until all survivors have connected."""

    name: str
    ranks: list[int]  # that may survive
    members: list[int]  # the rank in the job of each rank of the group, or empty
    attempt: int = 0
    peers: dict[Peer, int] = field(default_factory=dict)  # ranks that have come
    waiting: dict[Peer, tuple[int, float]] = field(default_factory=dict)  # their questions, and until when
    lost: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    survivors: list[int] = field(default_factory=list)  # as decided in this attempt, while they connect

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

    `end_start` ends a start of so many ranks, with an error; `left_out` sets the key of a rank that was left out.
    """

    def __init__(self, end_start: Callable[[str, int, PeerLost], None], left_out: Callable[[str], None]) -> None:
        super().__init__()
        self._groups: dict[str, _Regrouping] = {}
        self._done: dict[str, list[int]] = {}  # who has continued, of each group
        self._end_start, self._left_out = end_start, left_out

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind not in ("shrink", "lost"):
            return super().take(peer, message)
        request = message.fields
        name, rank = str(request["group"]), int(request["rank"])
        fresh = _Regrouping(name, list(request["ranks"]), list(request["members"]))
        group = fresh if name in self._done else self._groups.setdefault(name, fresh)
        others = [each for each in self._done.get(name, group.survivors or group.ranks) if each != rank]
        if name in self._done or rank not in (group.survivors or group.ranks):  # it comes too late, or again
            return [_answer(peer, request["id"], Agreement(others))] if message.kind == "shrink" else []
        group.peers[peer] = rank
        group.lost.update(request["lost"])
        return self._wait(group, peer, rank, request) if message.kind == "shrink" else []

    def set(self, key: str, value: bytes) -> Replies:
        """Note whether the survivors of a group have connected."""
        for group in [*self._groups.values()]:
            if value == CONNECTED and group.survivors and key == connected_key(group.start):
                self._done[group.name] = group.survivors
                del self._groups[group.name]
                for rank in sorted(group.left_out) if group.members else ():
                    self._left_out(left_out_key(group.members[rank]))
        return super().set(key, value)

    def leave(self, peer: Peer) -> Replies:
        """Also where a rank has given up: the others need not wait for it."""
        member, replies = self.present.get(peer), super().leave(peer)
        for group in self._groups.values():
            rank = group.forget(peer)
            if member and rank is not None and rank in group.survivors:
                error = lost_in_start(group.number(rank), member.process)
                self._end_start(group.start, len(group.survivors), error)
                replies += self._retry(group, error)
        return replies

    def due(self) -> float:
        """Return when to call `poll`."""
        return min((group.due() for group in self._groups.values()), default=math.inf)

    def poll(self) -> Replies:
        """Do what is due, or has become possible."""
        self._groups = {name: group for name, group in self._groups.items() if group.ranks}
        return [reply for group in self._groups.values() for reply in group.decide()]

    def _wait(self, group: _Regrouping, peer: Peer, rank: int, request: dict[str, Any]) -> Replies:
        replies: Replies = []
        if group.survivors:  # it has not connected with the others
            number = group.number(rank)
            error = PeerLost(f"rank {number} called shrink again before all had connected", rank=number)
            replies = self._retry(group, error)
        group.lost.discard(rank)
        group.waiting[peer] = request["id"], time.monotonic() + float(request["timeout"])
        return replies

    def _retry(self, group: _Regrouping, error: PeerLost) -> Replies:
        replies = self.propose(connected_key(group.start), encode_error(error).encode())
        group.retry()
        return replies


def _answer(peer: Peer, number: int, agreement: Agreement) -> tuple[Peer, bytes]:
    return peer, encode("agreed", id=number, **agreement._asdict())
