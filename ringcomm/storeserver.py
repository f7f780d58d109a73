"""Rank 0's side of the store of processes: it admits who can prove to be a rank, and serves until all have gone."""

import hmac
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from ringcomm.place import Place
from ringcomm.sockets import MESSAGE_BYTES, credentials, listen, stranger

__all__ = ["ALWAYS", "HELLO", "LINGER", "Server"]

log = logging.getLogger("ringcomm")

# Seconds for which rank 0 goes on serving the others when it has all it needs itself. They normally leave within
# milliseconds; this is as long as `ringcomm run` lets ranks live on when another has failed.
LINGER = 5.0
LONGEST_SLEEP = 3600.0  # seconds; a selector counts milliseconds in 32 bits

HELLO = struct.Struct("ii")  # what a rank says first: rank and size; the nonce follows
ALWAYS = ""  # a key that always has a value


class Server(threading.Thread):
    """Serves a SocketStore until every rank has come and gone, or rank 0 has gone before every rank came.

    Whoever connects may be a stranger: what it sends is refused and logged unless it begins as only a rank can.
    """

    def __init__(self, place: Place, address: str) -> None:
        super().__init__(name="ringcomm store", daemon=True)
        self._size = place.size
        self._nonce = os.fsencode(place.nonce)
        self._values: dict[str, bytes] = {ALWAYS: b""}
        self._failure = b""
        self._waiting: dict[socket.socket, tuple[str, float]] = {}  # the key it wants, and until when
        self._ranks: dict[socket.socket, int] = {}  # who is here
        self._pids: dict[int, int] = {0: os.getpid()}  # who has ever come
        self._end: float | None = None
        self._listener = listen(address, f"rank 0 of job {place.job!r}")
        self._open = ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._watch(self._listener, self._accept)
        self.client, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks[own] = 0
        self._watch(own, partial(self._serve, own))
        self.start()

    def run(self) -> None:
        with self._open:
            while not self._finished():
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._answer()

    def _finished(self) -> bool:
        if self._end is None:
            return False
        in_vain = len(self._pids) < self._size and not self._failure
        return in_vain or not self._ranks or time.monotonic() > self._end

    def _patience(self) -> float | None:
        ends = [end for _, end in self._waiting.values()] + ([self._end] if self._end else [])
        return min(max(0.0, min(ends) - time.monotonic()), LONGEST_SLEEP) if ends else None

    def _watch(self, peer: socket.socket, handler: Callable[[], None]) -> None:
        peer.setblocking(False)  # nobody can make the others wait
        self._open.callback(peer.close)
        self._selector.register(peer, selectors.EVENT_READ, handler)

    def _accept(self) -> None:
        with suppress(OSError):  # gone again
            peer, _ = self._listener.accept()
            if reason := stranger(peer):
                log.warning("refused a connection: %s", reason)
                peer.close()
            else:
                self._watch(peer, partial(self._serve, peer))

    def _serve(self, peer: socket.socket) -> None:
        try:
            message = peer.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._drop(peer)
        elif peer not in self._ranks:
            self._admit(peer, message)
        else:
            try:
                self._obey(peer, message)
            except ValueError:  # without a nonce, a stranger can come as a rank
                log.warning("refused process %d: it does not speak like a rank", credentials(peer)[0])
                self._drop(peer)

    def _obey(self, peer: socket.socket, message: bytes) -> None:
        kind, rest = message.split(b"\0", 1)
        if kind == b"set":
            key, value = rest.split(b"\0", 1)
            self._values[key.decode()] = value
        elif kind == b"abort":
            self._failure = self._failure or rest
        else:
            timeout, key = rest.split(b"\0", 1)
            seconds = float(timeout)
            if not seconds >= 0:
                raise ValueError(timeout)
            self._waiting[peer] = key.decode(), time.monotonic() + seconds

    def _admit(self, peer: socket.socket, message: bytes) -> None:
        pid, _ = credentials(peer)
        refusal = ""
        if len(message) < HELLO.size or not hmac.compare_digest(message[HELLO.size :], self._nonce):
            refusal = "it does not know the nonce of this job"
        else:
            rank, size = HELLO.unpack_from(message)
            if size != self._size or not 0 <= rank < size:
                refusal = f"it came as rank {rank} of {size} to a job of {self._size}"
            elif rank in self._pids:
                refusal = f"rank {rank} is already taken by process {self._pids[rank]}"
        if refusal:
            log.warning("refused process %d: %s", pid, refusal)
            self._reply(peer, "refused", refusal.encode())
            self._drop(peer)
        else:
            self._ranks[peer], self._pids[rank] = rank, pid
            self._reply(peer, "welcome", b"")

    def _answer(self) -> None:
        """Answer those who wait: with the value where there is one now, with who is missing where time is up."""
        for peer, (key, end) in list(self._waiting.items()):
            if self._failure:
                reply = "failure", self._failure
            elif key in self._values:
                reply = "value", self._values[key]
            elif time.monotonic() >= end:
                absent = [rank for rank in range(self._size) if rank not in self._pids]
                reply = "absent", json.dumps(absent).encode()
            else:
                continue
            del self._waiting[peer]
            self._reply(peer, *reply)

    def _reply(self, peer: socket.socket, kind: str, value: bytes) -> None:
        with suppress(OSError):  # it has gone, and the next read says so
            peer.send(f"{kind}\0".encode() + value)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        self._waiting.pop(peer, None)
        if self._ranks.pop(peer, None) == 0:
            self._end = time.monotonic() + LINGER
        peer.close()
