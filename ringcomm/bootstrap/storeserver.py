"""Rank 0's side of SocketStore: it authenticates the ranks, and serves them until all have left."""

import hmac
import json
import os
import socket
import struct
import threading
import time
from contextlib import closing, suppress

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.sockets import MESSAGE_BYTES, credentials
from ringcomm.errors import PeerLost, RingcommError, encode_error
from ringcomm.machine.threads import starting

__all__ = ["JOIN", "LINGER", "PRESENT_KEY", "StoreServer"]

# Seconds for which rank 0 serves the other ranks after it has left. They normally leave within milliseconds; `ringcomm
# run` lets ranks live for the same time after one has failed.
LINGER = 5.0
MAX_WAIT = 3600.0  # seconds; a selector counts milliseconds in 32 bits

JOIN = struct.Struct("ii")  # a rank's first message: rank and size, followed by the nonce
PRESENT_KEY = ""  # a key that always has a value


class StoreServer(threading.Thread):
    """Serves a SocketStore until every rank has joined and left, or rank 0 has left before every rank has joined.

    Any process may connect: the server refuses and logs one whose first message is not that of a rank of this job.
    """

    def __init__(self, place: Place, address: str) -> None:
        super().__init__(name="ringcomm store", daemon=True)
        self._size = place.size
        self._nonce = os.fsencode(place.nonce)
        self._values: dict[str, bytes] = {PRESENT_KEY: b""}
        self._failure = b""
        self._pending: dict[socket.socket, tuple[str, float]] = {}  # gets without an answer: key, deadline
        self._ranks: dict[socket.socket, int] = {}  # connected, and have not left
        self._pids: dict[int, int] = {0: os.getpid()}  # of every rank that has ever joined
        self._deadline: float | None = None  # set when rank 0 leaves
        self._peers = PeerServer(address, f"rank 0 of job {place.job!r}", self._receive)
        self.client, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks[own] = 0
        self._peers.add(own)
        with starting(f"the thread {self.name!r}"):
            self.start()

    def run(self) -> None:
        while not self._finished():
            self._serve(self._select_timeout())
        while self._serve(0):  # ranks that have connected meanwhile get the failure too
            pass

    def leave(self, late: float) -> None:
        """Wait until this thread has ended. A failure is then told to the ranks that arrive within `late` seconds.

        The caller does not wait for them. The process does, when it exits: their thread is no daemon.
        """
        self.join()
        if self._failure and late and self._incomplete():
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self._tell_late_ranks, args=(late,), name="ringcomm late ranks").start()
                return
        self._peers.close()

    def _tell_late_ranks(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with closing(self._peers):
            while self._incomplete() and (left := deadline - time.monotonic()) > 0:
                self._serve(left)

    def _incomplete(self) -> bool:
        return len(self._pids) < self._size

    def _serve(self, timeout: float | None) -> bool:
        """Handle what comes within `timeout` seconds; return whether anything came."""
        try:
            served = self._peers.serve(timeout)
        except RingcommError as error:  # no descriptor is left
            self._fail(error)
            served = True
        self._answer_pending()
        return served

    def _finished(self) -> bool:
        if self._deadline is None:
            return False
        return (self._incomplete() and not self._failure) or not self._ranks or time.monotonic() > self._deadline

    def _select_timeout(self) -> float | None:
        deadlines = [deadline for _, deadline in self._pending.values()] + ([self._deadline] if self._deadline else [])
        return min(max(0.0, min(deadlines) - time.monotonic()), MAX_WAIT) if deadlines else None

    def _receive(self, peer: socket.socket) -> None:
        try:
            message = peer.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            if rank := self._ranks.get(peer):  # a rank that ends as it should says so
                self._fail(PeerLost(f"rank {rank} (process {self._pids[rank]}) exited during startup", rank=rank))
            self._leave(peer)
            self._peers.drop(peer)
        elif peer not in self._ranks:
            self._join(peer, message)
        else:
            try:
                self._handle(peer, message)
            except ValueError:  # without a nonce, any process of this user can join
                self._leave(peer)
                self._peers.refuse(peer, "malformed request")

    def _handle(self, peer: socket.socket, message: bytes) -> None:
        kind, rest = message.split(b"\0", 1)
        if kind == b"set":
            key, value = rest.split(b"\0", 1)
            self._values[key.decode()] = value
        elif kind == b"abort":
            self._failure = self._failure or rest
        elif kind == b"leave":
            self._leave(peer)
        else:
            timeout, key = rest.split(b"\0", 1)
            seconds = float(timeout)
            if not seconds >= 0:
                raise ValueError(timeout)
            self._pending[peer] = key.decode(), time.monotonic() + seconds

    def _join(self, peer: socket.socket, message: bytes) -> None:
        refusal = ""
        if len(message) < JOIN.size or not hmac.compare_digest(message[JOIN.size :], self._nonce):
            refusal = "wrong nonce for this job"
        else:
            rank, size = JOIN.unpack_from(message)
            if size != self._size or not 0 <= rank < size:
                refusal = f"expected a rank of {self._size}, got rank {rank} of {size}"
            elif rank in self._pids:
                refusal = f"rank {rank} is already taken by process {self._pids[rank]}"
        if refusal:
            self._reply(peer, "refused", refusal.encode())
            self._peers.refuse(peer, refusal)
            return
        self._pids[rank] = credentials(peer)[0]
        if self._failure:
            self._reply(peer, "failure", self._failure)
            self._peers.drop(peer)
        else:
            self._ranks[peer] = rank
            self._reply(peer, "joined", b"")

    def _answer_pending(self) -> None:
        """Answer each pending get that has failed, has a value, or has timed out (with the missing ranks)."""
        for peer, (key, deadline) in list(self._pending.items()):
            if self._failure:
                reply = "failure", self._failure
            elif key in self._values:
                reply = "value", self._values[key]
            elif time.monotonic() >= deadline:
                absent = [rank for rank in range(self._size) if rank not in self._pids]
                reply = "absent", json.dumps(absent).encode()
            else:
                continue
            del self._pending[peer]
            self._reply(peer, *reply)

    def _reply(self, peer: socket.socket, kind: str, value: bytes) -> None:
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer.send(f"{kind}\0".encode() + value)

    def _fail(self, error: RingcommError) -> None:
        self._failure = self._failure or encode_error(error).encode()

    def _leave(self, peer: socket.socket) -> None:
        self._pending.pop(peer, None)
        if self._ranks.pop(peer, None) == 0:
            self._deadline = time.monotonic() + LINGER
