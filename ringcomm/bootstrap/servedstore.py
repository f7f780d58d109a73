"""Stores as their server keeps them: of a startup, with the error that ends it for all; and one that lasts."""

import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ringcomm.bootstrap.arrivals import rank_in_job
from ringcomm.errors import PeerLost, RingcommError, encode_error

__all__ = ["JOIN", "PRESENT_KEY", "ServedLastingStore", "ServedStore", "reply"]

JOIN = struct.Struct("!ii")  # begins a member's first message: rank and size
PRESENT_KEY = ""  # a key that always has a value


class ServedStore:
    """The store of `size` members: ranks, or the launchers of several hosts.

    `in_job`: the rank in the job of each rank: see arrivals.py.
    """

    member = "rank"

    def __init__(self, size: int, in_job: Sequence[int] = ()) -> None:
        self.size = size
        self._in_job = in_job
        self.failure = b""
        self.members: dict[socket.socket, int] = {}  # connected, and have not left
        self.processes: dict[int, str] = {}  # of every member that has ever joined
        self._values: dict[str, bytes] = {PRESENT_KEY: b""}
        self._pending: dict[socket.socket, tuple[str, float]] = {}  # gets without an answer: key, deadline

    @property
    def complete(self) -> bool:
        return len(self.processes) == self.size

    def join(self, peer: socket.socket, rank: int, size: int, process: str) -> str:
        """Take in a member and answer it; return why it is refused, or an empty string."""
        if size != self.size or not 0 <= rank < size:
            return f"expected a {self.member} of {self.size}, got {self.member} {rank} of {size}"
        if self.failure:
            self.processes.setdefault(rank, process)
            reply(peer, "failure", self.failure)
        elif rank in self.processes:
            return f"{self.member} {rank} is already taken by {self.processes[rank]}"
        else:
            self.members[peer], self.processes[rank] = rank, process
            reply(peer, "joined", b"")
        return ""

    def handle(self, peer: socket.socket, message: bytes) -> None:
        """Do what a member asks for; raise ValueError if it cannot be understood."""
        kind, rest = message.split(b"\0", 1)
        if kind == b"set":
            key, value = rest.split(b"\0", 1)
            self._values[key.decode()] = value
        elif kind == b"abort":
            self.failure = self.failure or rest
        elif kind == b"leave":
            self.leave(peer)
        else:
            timeout, key = rest.split(b"\0", 1)
            seconds = float(timeout)
            if not seconds >= 0:
                raise ValueError(timeout)
            self._pending[peer] = key.decode(), time.monotonic() + seconds

    def push(self, value: bytes) -> None:
        """Send each member a value that it has not asked for."""
        for peer in self.members:
            reply(peer, "value", value)

    def fail(self, error: RingcommError) -> None:
        self.failure = self.failure or encode_error(error).encode()

    def lose(self, peer: socket.socket, _: OSError | None) -> None:
        """Forget a peer whose connection has ended, for the given reason; a member that ends as it should has left."""
        if (rank := self.members.get(peer)) is not None:
            number = rank_in_job(self._in_job, rank)
            self.fail(PeerLost(f"rank {number} ({self.processes[rank]}) exited during startup", rank=number))
        self.leave(peer)

    def leave(self, peer: socket.socket) -> None:
        self._pending.pop(peer, None)
        self.members.pop(peer, None)

    def deadlines(self) -> Iterator[float]:
        return (deadline for _, deadline in self._pending.values())

    def answer_pending(self) -> None:
        """Answer each pending get that has failed, has a value, or has timed out (with the missing members)."""
        for peer, (key, deadline) in list(self._pending.items()):
            if self.failure:
                answer = "failure", self.failure
            elif key in self._values:
                answer = "value", self._values[key]
            elif time.monotonic() >= deadline:
                absent = [rank for rank in range(self.size) if rank not in self.processes]
                answer = "absent", json.dumps(absent).encode()
            else:
                continue
            del self._pending[peer]
            reply(peer, *answer)


class ServedLastingStore(ServedStore):
    """A store for any number of members, which come and go. What a member has set goes with it."""

    def __init__(self) -> None:
        super().__init__(0)
        self._set_by: defaultdict[socket.socket, set[str]] = defaultdict(set)

    def join(self, peer: socket.socket, rank: int, size: int, process: str) -> str:  # noqa: ARG002
        self.members[peer] = rank
        reply(peer, "joined", b"")
        return ""

    def handle(self, peer: socket.socket, message: bytes) -> None:
        kind, rest = message.split(b"\0", 1)
        if kind == b"propose":
            key, value = rest.split(b"\0", 1)
            self._values.setdefault(key.decode(), value)
            return
        super().handle(peer, message)
        if kind == b"set":
            self._set_by[peer].add(rest.split(b"\0", 1)[0].decode())

    def lose(self, peer: socket.socket, _: OSError | None) -> None:
        self.leave(peer)

    def leave(self, peer: socket.socket) -> None:
        super().leave(peer)
        for key in self._set_by.pop(peer, set()) - set().union(*self._set_by.values()):
            del self._values[key]


def reply(peer: socket.socket, kind: str, value: bytes) -> None:
    with suppress(OSError):  # it has disconnected; the next read reports that
        peer.send(f"{kind}\0".encode() + value)
