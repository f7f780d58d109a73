"""The server of survivors.py, in the launcher of node 0.

Unlike the store of a start, it lasts until the job ends, and the loss of a rank does not end it.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringcomm.bootstrap.servedstore import ServedStore, reply
from ringcomm.errors import PeerLost

__all__ = ["SURVIVORS", "ServedSurvivors", "start_name"]

SURVIVORS = "survivors"  # its name


def start_name(group: str, attempt: int) -> str:
    """Return the name of the start with which the ranks that are left of a group connect."""
    return f"{group}.{attempt}"


@dataclass
class _BrokenGroup:
    """A group of which some ranks are lost, until all that are left have connected."""

    ranks: list[int]  # that may be left
    members: list[int]  # the rank in the job of each rank of the group, or empty
    attempt: int = 0
    peers: dict[socket.socket, int] = field(default_factory=dict)  # ranks that have come
    waiting: dict[socket.socket, float] = field(default_factory=dict)  # their deadlines
    lost: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)  # as decided in this attempt
    connected: set[int] = field(default_factory=set)

    def late(self) -> bool:
        return any(time.monotonic() >= deadline for deadline in self.waiting.values())


class ServedSurvivors(ServedStore):
    """Decides for each group who is left.

    `end_start` ends a start of so many ranks, with an error; `end_ranks` ends ranks of the job that were left out.
    """

    def __init__(self, end_start: Callable[[str, int, PeerLost], None], end_ranks: Callable[[list[int]], None]) -> None:
        super().__init__(0)
        self._groups: dict[str, _BrokenGroup] = {}
        self._done: dict[str, Sequence[int]] = {}  # who has continued, of each group
        self._processes: dict[socket.socket, str] = {}
        self._end_start, self._end_ranks = end_start, end_ranks

    def join(self, peer: socket.socket, rank: int, size: int, process: str) -> str:  # noqa: ARG002
        self.members[peer], self._processes[peer] = rank, process
        reply(peer, "joined", b"")
        return ""

    def handle(self, peer: socket.socket, message: bytes) -> None:
        kind, rest = message.split(b"\0", 1)
        if kind == b"leave":
            self.leave(peer)
            return
        try:
            request = json.loads(rest)
            self._take(peer, kind.decode(), request["group"], request)
        except (KeyError, TypeError) as error:
            raise ValueError(message) from error

    def _take(self, peer: socket.socket, kind: str, name: str, request: dict[str, Any]) -> None:
        rank = int(request["rank"])
        if name in self._done:  # whoever comes now, or comes again, is too late
            self._answer(peer, kind, left=[each for each in self._done[name] if each != rank])
            return
        group = self._groups.setdefault(name, _BrokenGroup(list(request["ranks"]), list(request["members"])))
        if rank not in group.ranks or (group.left and rank not in group.left):
            self._answer(peer, kind, left=group.left or group.ranks)
            return
        if kind == "shrink" and group.left:  # it does not connect with the others, who agree again
            self._fail(name, group)
            group = self._groups[name]
        group.peers[peer] = rank
        group.lost.update(request["lost"])
        if kind == "lost":
            return
        if kind == "shrink":
            group.lost.discard(rank)
        elif request["attempt"] != group.attempt:
            self._answer(peer, kind, left=[])  # that attempt has failed
            return
        elif kind == "failed":
            self._fail(name, group)
            return
        else:
            group.connected.add(rank)
        group.waiting[peer] = time.monotonic() + float(request["timeout"])

    def lose(self, peer: socket.socket, _: OSError | None) -> None:
        self.leave(peer)

    def leave(self, peer: socket.socket) -> None:
        """Also where a rank has given up: the others need not wait for it."""
        self.members.pop(peer, None)
        process = self._processes.pop(peer, "")
        for name, group in [*self._groups.items()]:
            rank = group.peers.pop(peer, None)
            group.waiting.pop(peer, None)
            if rank is None:
                continue
            group.lost.add(rank)
            if rank in group.left:
                number = group.members[rank] if group.members else group.left.index(rank)
                error = PeerLost(f"rank {number} ({process}) exited during startup", rank=number)
                self._end_start(start_name(name, group.attempt), len(group.left), error)
                self._fail(name, group)

    def deadlines(self) -> Iterator[float]:
        return (deadline for group in self._groups.values() for deadline in group.waiting.values())

    def answer_pending(self) -> None:
        for name, group in [*self._groups.items()]:
            if not group.left:
                came = {group.peers[peer] for peer in group.waiting}
                if came and (group.late() or came.issuperset(set(group.ranks) - group.lost)):
                    group.left = sorted(came)
                    group.left_out |= set(group.ranks) - came - group.lost
                    known = {"left": group.left, "lost": sorted(group.lost), "attempt": group.attempt}
                    self._answer_all(group, "shrink", **known)
            elif group.connected.issuperset(group.left):
                self._answer_all(group, "connected", left=group.left)
                self._done[name] = group.left
                del self._groups[name]
                if group.members and group.left_out:
                    self._end_ranks([group.members[rank] for rank in sorted(group.left_out)])
            elif group.late():
                self._fail(name, group)

    def _fail(self, name: str, group: _BrokenGroup) -> None:
        """End an attempt: those that are left agree again."""
        self._answer_all(group, "connected", left=[])
        ranks = [rank for rank in group.left if rank not in group.lost]
        if ranks:
            self._groups[name] = _BrokenGroup(
                ranks, group.members, group.attempt + 1, group.peers, lost=group.lost, left_out=group.left_out
            )
        else:
            del self._groups[name]

    def _answer_all(self, group: _BrokenGroup, kind: str, **answer: object) -> None:
        while group.waiting:
            self._answer(group.waiting.popitem()[0], kind, **answer)

    def _answer(self, peer: socket.socket, kind: str, **answer: object) -> None:
        if kind in ("shrink", "connected"):
            reply(peer, "value", json.dumps(answer).encode())
