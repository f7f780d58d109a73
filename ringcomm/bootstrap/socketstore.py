"""The client of a store: over a Unix socket between the ranks of one host."""

import errno
import hashlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self

from ringcomm.bootstrap.arrivals import arrival_timeout, key_timeout, rank_in_job
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.servedstore import JOIN, PRESENT_KEY
from ringcomm.bootstrap.sockets import MESSAGE_BYTES, packet_socket, untrusted_reason
from ringcomm.bootstrap.storeserver import LINGER, StoreServer
from ringcomm.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    RingcommError,
    decode_error,
    encode_error,
    refuse,
)

__all__ = ["SocketStore"]

log = logging.getLogger("ringcomm")

LATE = 10.0  # seconds for which the server tells those that arrive after a failure about it


class _UntrustedServer(ConnectionError):
    """A process of another user listens at the address."""


class SocketStore:
    """The store for ranks that are processes of one host: a socket named by user and job, served by rank 0.

    The constructor returns when this rank has joined. It raises ArgumentError if rank 0 refuses this process: for a
    rank that is taken, another job size, or a wrong nonce.

    After an exception in the body of `with`, a server in this process tells those that arrive late about the failure.
    """

    _server_name = ""  # that of rank 0
    _member = "rank"
    _answer_limit: float | None = None  # seconds for an answer, after the time of the question; None: LINGER
    _warn_after = math.inf  # seconds before this process says that it waits for the server

    def __init__(self, place: Place, timeout: float) -> None:
        self._place, self._timeout = place, timeout
        self._first = rank_in_job(place.members, 0)
        self._server_name = self._server_name or f"rank {self._first}"
        self._server: StoreServer | None = None
        self._silent = False  # the server owes an answer, which would be taken for that of the next question
        self._socket = self._connect(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        # An interrupted start ends at once.
        self.close(late=min(self._timeout, LATE) if isinstance(error, Exception) else 0.0)

    @property
    def server(self) -> str:
        return self._place.store

    @property
    def members(self) -> tuple[int, ...]:
        return self._place.members

    def set(self, key: str, value: bytes) -> None:
        self._send(f"set\0{key}\0".encode() + value)

    def get(self, key: str, timeout: float) -> bytes:
        if self._silent:
            raise self._lost(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        self._ask(key, timeout)
        # The server keeps the time: it knows who is missing.
        limit = timeout + (LINGER if self._answer_limit is None else self._answer_limit)
        self._socket.settimeout(limit)
        try:
            return self._answer(key, timeout)
        except CollectiveTimeout:
            raise
        except TimeoutError:
            self._silent = True
            raise CollectiveTimeout(
                f"{self._server_name} did not answer within {limit:g} s", rank=self._first
            ) from None

    def abort(self, error: RingcommError) -> None:
        with suppress(PeerLost):
            self._send(b"abort\0" + encode_error(error).encode())

    def check(self) -> None:
        self.get(PRESENT_KEY, timeout=0)

    def close(self, late: float = 0.0) -> None:
        """Leave the store. A server in this process serves the others until they have left too.

        After that it tells those that arrive within `late` seconds about a failure.
        """
        if self._server:
            self._server.late = late
        with suppress(OSError):
            self._socket.send(b"leave\0")
            self._hang_up()
        self._socket.close()
        if self._server:
            self._server.join()

    def _connect(self, timeout: float) -> socket.socket:
        digest = hashlib.sha256(os.fsencode(self._place.job)).hexdigest()
        address = f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
        if self._place.rank == 0:
            self._server = StoreServer(self._place, address)
            return self._server.client
        return self._join(lambda seconds: _connect_unix(address, seconds), os.fsencode(self._place.nonce), timeout)

    def _join(self, connect: Callable[[float], socket.socket], identity: bytes, timeout: float) -> socket.socket:
        """Connect as soon as the server listens, and say who this is."""
        deadline = time.monotonic() + timeout
        quiet_until = time.monotonic() + self._warn_after
        request = JOIN.pack(self._place.rank, self._place.size) + identity
        pause = 0.001
        logged = ""
        while True:
            # Refused, busy or disconnected: the server does not listen yet. No call waits for that, so poll.
            try:
                with ExitStack() as stack:
                    peer = stack.enter_context(connect(max(pause, deadline - time.monotonic())))
                    peer.settimeout(max(pause, deadline - time.monotonic()))
                    peer.send(request)
                    kind, _, text = peer.recv(MESSAGE_BYTES).partition(b"\0")
                    if kind == b"failure":
                        raise self._as_told_late(decode_error(text))
                    if kind == b"refused":
                        reason = f"{self._server_name} refused this process: {text.decode()}"
                        raise ArgumentError(reason, rank=self._place.rank)
                    if kind == b"joined":
                        stack.pop_all()
                        return peer
                failure = "it closed the connection"
            except RingcommError:
                raise
            except (ConnectionError, BlockingIOError, TimeoutError) as error:
                failure = str(error)
                if isinstance(error, _UntrustedServer) and failure != logged:
                    log.warning("refused to join: %s", failure)
                    logged = failure
            if time.monotonic() + pause > deadline:
                raise self._unreachable(timeout, failure)
            if time.monotonic() > quiet_until:
                what = f"{self._server_name} did not come within {self._warn_after:g} s ({failure})"
                log.warning("%s; waiting up to %g s", what, timeout)
                quiet_until = math.inf
            time.sleep(pause)
            pause = min(2 * pause, 0.05)  # short beside the start of an interpreter

    def _as_told_late(self, error: RingcommError) -> RingcommError:
        own = rank_in_job(self.members, self._place.rank)
        if isinstance(error, CollectiveTimeout) and own in (error.got or ()):
            return CollectiveTimeout(f"this {self._member} came too late: {error}", rank=error.rank, got=error.got)
        return error

    def _ask(self, key: str, timeout: float) -> None:
        self._send(f"get\0{timeout}\0{key}".encode())

    def _answer(self, key: str, timeout: float) -> bytes:
        """Receive the answer to `_ask`; raises what the socket raises while there is none."""
        failure = None
        try:
            kind, _, value = self._socket.recv(MESSAGE_BYTES).partition(b"\0")
        except OSError as error:
            if isinstance(error, BlockingIOError | TimeoutError) and error.errno != errno.ETIMEDOUT:
                raise
            kind, value, failure = b"", b"", error
        if kind == b"value":
            return value
        if kind == b"failure":
            raise decode_error(value)
        if kind == b"absent":
            absent = json.loads(value)
            if absent:
                raise arrival_timeout(absent, self._place.size, timeout, self._member, self.members)
            raise key_timeout(key, timeout)
        raise self._lost(failure)

    def _send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise refuse("a store message", f"at most {MESSAGE_BYTES} bytes", len(message))
        try:
            self._socket.send(message)
        except OSError as error:
            raise self._lost(error) from None

    def _hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy of this socket

    def _lost(self, error: OSError | None) -> PeerLost:
        silent = error and error.errno == errno.ETIMEDOUT
        text = f"rank {self._first} {'does not answer' if silent else 'exited during startup'}"
        return PeerLost(text, rank=self._first)

    def _unreachable(self, timeout: float, _: str) -> CollectiveTimeout:
        return arrival_timeout([0], self._place.size, timeout, members=self.members)


def _connect_unix(address: str, seconds: float) -> socket.socket:
    with ExitStack() as failed:
        peer = failed.enter_context(packet_socket())
        peer.settimeout(seconds)
        peer.connect(address)
        if reason := untrusted_reason(peer):
            raise _UntrustedServer(reason)
        failed.pop_all()
    return peer
