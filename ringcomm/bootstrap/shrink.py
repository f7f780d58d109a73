"""How the ranks of a group on several hosts agree who survives: the launcher of node 0 decides.

    rank → server    shrink: the ranks of the group, the lost ones that this one knows of, how long it waits
    server → rank    the survivors: once every other rank has come or is lost, or the time of one that waits is over
    rank → server    connected, or failed: an attempt to connect the survivors
    server → rank    whether all are connected; otherwise all agree again

Meanwhile each rank reports losses that it learns of; its own end, and the end of its connection, count as its
loss. Once all survivors are connected, they have continued: a rank that comes later learns who has left it out.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from ringcomm.bootstrap.key_values import Peer, Replies
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.wire.framing import Frame, encode
from ringcomm.errors import PeerLost

__all__ = ["Agreement", "Shrink", "left_out_key", "start_name"]

# The messages that have an answer.
QUESTIONS = ("shrink", "connected")


class Agreement(NamedTuple):
    """Who survives. If the rank that asks does not, the others have continued without it."""

    survivors: list[int]
    lost: Sequence[int] = ()  # the others run, but did not come
    attempt: int = 0  # to connect them


def start_name(group: str, attempt: int) -> str:
    """Return the name of the start in which the survivors of a group connect."""
    return f"{group}.{attempt}"


def left_out_key(rank: int) -> str:
    """Return the key of the session of the members that tells the launchers to end a rank of the job."""
    return f"left_out/{rank}"


class _State(Enum):
    GATHERING = auto()  # ranks come, or are lost
    CONNECTING = auto()  # the survivors connect


@dataclass
class _Regrouping:
    """A group that has lost ranks, until all survivors have connected."""

    name: str
    ranks: list[int]  # that may survive
    members: list[int]  # the rank in the job of each rank of the group, or empty
    state: _State = _State.GATHERING
    attempt: int = 0
    peers: dict[Peer, int] = field(default_factory=dict)  # ranks that have come
    waiting: dict[Peer, tuple[int, float]] = field(default_factory=dict)  # their questions, and until when
    lost: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    survivors: list[int] = field(default_factory=list)  # as decided in this attempt
    connected: set[int] = field(default_factory=set)

    def take(self, peer: Peer, kind: str, request: dict[str, Any]) -> Replies:
        rank = int(request["rank"])
        if rank not in (self.survivors or self.ranks):
            return _answer(peer, kind, request, Agreement(self.survivors or self.ranks))
        self.peers[peer] = rank
        self.lost.update(request["lost"])
        return RULES[self.state, kind](self, peer, rank, request)

    def note(self, *_: object) -> Replies:
        return []

    def wait(self, peer: Peer, rank: int, request: dict[str, Any]) -> Replies:
        self.lost.discard(rank)
        self.waiting[peer] = request["id"], time.monotonic() + float(request["timeout"])
        return []

    def wait_again(self, peer: Peer, rank: int, request: dict[str, Any]) -> Replies:
        """It does not connect with the others, who agree again."""
        replies = self.retry()
        return [*replies, *self.wait(peer, rank, request)]

    def reject(self, peer: Peer, _: int, request: dict[str, Any]) -> Replies:
        return _answer(peer, "connected", request, Agreement([]))  # that attempt has failed

    def confirm(self, peer: Peer, rank: int, request: dict[str, Any]) -> Replies:
        if request["attempt"] != self.attempt:
            return self.reject(peer, rank, request)
        self.connected.add(rank)
        self.waiting[peer] = request["id"], time.monotonic() + float(request["timeout"])
        return []

    def give_up(self, _: Peer, __: int, request: dict[str, Any]) -> Replies:
        return self.retry() if request["attempt"] == self.attempt else []

    def retry(self, *_: object) -> Replies:
        """End an attempt: the survivors agree again."""
        replies = self.answer_all(Agreement([]))
        self.ranks = [rank for rank in self.survivors if rank not in self.lost]
        self.state, self.survivors, self.connected = _State.GATHERING, [], set()
        self.attempt += 1
        return replies

    def forget(self, peer: Peer) -> int | None:
        """Return which rank of the group this was; its end is its loss."""
        self.waiting.pop(peer, None)
        rank = self.peers.pop(peer, None)
        if rank is not None:
            self.lost.add(rank)
        return rank

    def decide(self) -> Replies:
        """Decide who survives, once all others have come or are lost, or it is time."""
        came = {self.peers[peer] for peer in self.waiting}
        if not came or not (self.late() or came.issuperset(set(self.ranks) - self.lost)):
            return []
        self.state, self.survivors = _State.CONNECTING, sorted(came)
        self.left_out |= set(self.ranks) - came - self.lost
        return self.answer_all(Agreement(self.survivors, sorted(self.lost), self.attempt))

    def late(self) -> bool:
        return self.due() <= time.monotonic()

    def due(self) -> float:
        return min((deadline for _, deadline in self.waiting.values()), default=math.inf)

    def answer_all(self, agreement: Agreement) -> Replies:
        waiting, self.waiting = self.waiting, {}
        return [(peer, _encode(number, agreement)) for peer, (number, _) in waiting.items()]


RULES: dict[tuple[_State, str], Callable[[_Regrouping, Peer, int, dict[str, Any]], Replies]] = {
    (_State.GATHERING, "shrink"): _Regrouping.wait,
    (_State.GATHERING, "lost"): _Regrouping.note,
    (_State.GATHERING, "connected"): _Regrouping.reject,
    (_State.GATHERING, "failed"): _Regrouping.note,
    (_State.CONNECTING, "shrink"): _Regrouping.wait_again,
    (_State.CONNECTING, "lost"): _Regrouping.note,
    (_State.CONNECTING, "connected"): _Regrouping.confirm,
    (_State.CONNECTING, "failed"): _Regrouping.give_up,
}


class Shrink:
    """The session in which each group agrees who survives. It lasts until the job ends.

    `end_start` ends a start of so many ranks, with an error; `left_out` sets the key of a rank that was left out.
    """

    def __init__(self, end_start: Callable[[str, int, PeerLost], None], left_out: Callable[[str], None]) -> None:
        self._groups: dict[str, _Regrouping] = {}
        self._done: dict[str, list[int]] = {}  # who has continued, of each group
        self._processes: dict[Peer, str] = {}
        self._end_start, self._left_out = end_start, left_out

    def join(self, peer: Peer, hello: Frame) -> Replies:
        self._processes[peer] = str(hello.fields["process"])
        return [(peer, encode("joined"))]

    def has(self, peer: Peer) -> bool:
        return peer in self._processes

    def take(self, peer: Peer, message: Frame) -> Replies:
        if message.kind == "leave":
            return self.lose(peer, "has left")
        request = message.fields
        name, rank = str(request["group"]), int(request["rank"])
        if name in self._done:  # a rank that comes now, or again, is too late
            others = [each for each in self._done[name] if each != rank]
            return _answer(peer, message.kind, request, Agreement(others))
        fresh = _Regrouping(name, list(request["ranks"]), list(request["members"]))
        return self._groups.setdefault(name, fresh).take(peer, message.kind, request)

    def lose(self, peer: Peer, _: str) -> Replies:
        """Also where a rank has given up: the others need not wait for it."""
        process, replies = self._processes.pop(peer, ""), []
        for group in self._groups.values():
            rank = group.forget(peer)
            if rank is not None and rank in group.survivors:
                error = lost_in_start(group.members[rank] if group.members else group.survivors.index(rank), process)
                self._end_start(start_name(group.name, group.attempt), len(group.survivors), error)
                replies += group.retry()
        return replies

    def due(self) -> float:
        return min((group.due() for group in self._groups.values()), default=math.inf)

    def poll(self) -> Replies:
        return [reply for group in [*self._groups.values()] for reply in self._advance(group)]

    def _advance(self, group: _Regrouping) -> Iterator[tuple[Peer, bytes]]:
        if not group.ranks:
            del self._groups[group.name]
        elif group.state is _State.GATHERING:
            yield from group.decide()
        elif group.connected.issuperset(group.survivors):
            yield from group.answer_all(Agreement(group.survivors))
            self._done[group.name] = group.survivors
            del self._groups[group.name]
            for rank in sorted(group.left_out) if group.members else ():
                self._left_out(left_out_key(group.members[rank]))
        elif group.late():
            yield from group.retry()


def _answer(peer: Peer, kind: str, request: dict[str, Any], agreement: Agreement) -> Replies:
    return [(peer, _encode(request["id"], agreement))] if kind in QUESTIONS else []


def _encode(number: int, agreement: Agreement) -> bytes:
    return encode("agreed", id=number, **agreement._asdict())
