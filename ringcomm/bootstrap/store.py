"""The key-value store that the ranks of a job share during startup, and the error that ends the startup of all."""

import hashlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.sockets import MESSAGE_BYTES, packet_socket, untrusted_reason
from ringcomm.bootstrap.storeserver import JOIN, LINGER, PRESENT_KEY, StoreServer
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    RingcommError,
    decode_error,
    encode_error,
    refuse,
)
from ringcomm.machine import descriptors

__all__ = [
    "HashStore",
    "SocketStore",
    "Store",
    "arrival_timeout",
    "format_ranks",
    "job_store",
    "open_store",
    "shared_failure",
]

log = logging.getLogger("ringcomm")

LATE = 10.0  # seconds for which rank 0 tells the ranks that arrive after a failure about it

_starts = itertools.count()


class Store(Protocol):
    """What the ranks share before they share memory."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until a rank has set `key`; raise CollectiveTimeout after `timeout` seconds.

        Raises the error of `abort` as soon as any rank has called it, even if `key` is set.
        """

    def abort(self, error: RingcommError) -> None:
        """Fail the startup of all ranks: `get` and `check` raise `error` from now on. The first error wins."""

    def check(self) -> None:
        """Raise the error of `abort` if any rank has called it."""


class HashStore:
    """The store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._failure = b""
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            found = self._changed.wait_for(lambda: self._failure or key in self._values, timeout)
            self.check()
            if not found:
                raise _key_timeout(key, timeout)
            return self._values[key]

    def abort(self, error: RingcommError) -> None:
        with self._changed:
            self._failure = self._failure or encode_error(error).encode()
            self._changed.notify_all()

    def check(self) -> None:
        if self._failure:
            raise decode_error(self._failure)


class SocketStore:
    """The store for ranks that are processes of one host: a socket named by user and job, served by rank 0.

    The constructor returns when this rank has joined. It raises ArgumentError if rank 0 refuses this process: for a
    rank that is taken, another job size, or a wrong nonce.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        digest = hashlib.sha256(os.fsencode(place.job)).hexdigest()
        address = f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
        self.late = 0.0  # seconds for which rank 0, after it has left, tells the ranks that arrive about a failure
        self._size = place.size
        self._server = StoreServer(place, address) if place.rank == 0 else None
        self._socket = self._server.client if self._server else _join(place, address, timeout)

    def set(self, key: str, value: bytes) -> None:
        self._send(f"set\0{key}\0".encode() + value)

    def get(self, key: str, timeout: float) -> bytes:
        self._send(f"get\0{timeout}\0{key}".encode())
        self._socket.settimeout(timeout + LINGER)  # rank 0 keeps the time: it knows the missing ranks
        try:
            kind, _, value = self._socket.recv(MESSAGE_BYTES).partition(b"\0")
        except TimeoutError:
            raise CollectiveTimeout(f"rank 0 did not answer within {timeout:g} s", rank=0) from None
        except ConnectionResetError:
            kind = value = b""
        if kind == b"value":
            return value
        if kind == b"failure":
            raise decode_error(value)
        if kind == b"absent":
            absent = json.loads(value)
            raise arrival_timeout(absent, self._size, timeout) if absent else _key_timeout(key, timeout)
        raise PeerLost("rank 0 exited during startup", rank=0)

    def abort(self, error: RingcommError) -> None:
        with suppress(PeerLost):
            self._send(b"abort\0" + encode_error(error).encode())

    def check(self) -> None:
        self.get(PRESENT_KEY, timeout=0)

    def close(self) -> None:
        """Leave the store. Rank 0 serves the other ranks until they have left too, and tells late ones: see `late`."""
        with suppress(OSError):
            self._socket.send(b"leave\0")
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy of this socket
        self._socket.close()
        if self._server:
            self._server.leave(self.late)

    def _send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise refuse("a store message", f"at most {MESSAGE_BYTES} bytes", len(message))
        try:
            self._socket.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerLost("rank 0 exited during startup", rank=0) from None


@contextmanager
def open_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of the next startup of this job; if the body raises on one rank, startup fails on all.

    Each rank numbers its startups, so that a second one does not join the store of the first.
    """
    with job_store(replace(place, job=f"{place.job}#{next(_starts)}"), timeout) as store:
        yield store


@contextmanager
def job_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of a job that no other startup uses."""
    if place.size == 1:
        yield HashStore()
        return
    refused = None
    if place.rank == 0:  # before the others connect
        try:
            descriptors.provide(0, place.size)
        except RingcommError as error:
            refused = error
    store = SocketStore(place, timeout)
    with closing(store), shared_failure(store, place.rank):
        try:
            if refused:
                raise refused
            yield store
        except Exception:  # whoever interrupts a start wants it to end at once
            store.late = min(timeout, LATE)
            raise


@contextmanager
def shared_failure(store: Store, rank: int) -> Iterator[None]:
    """Abort the startup of all ranks with the error that the body raises on this one."""
    try:
        yield
    except RingcommError as error:
        store.abort(error)
        raise
    except BaseException as error:
        store.abort(Aborted(f"rank {rank} aborted startup: {error!r}", rank=rank))
        raise


def _join(place: Place, address: str, timeout: float) -> socket.socket:
    """Connect to rank 0 as soon as it listens."""
    deadline = time.monotonic() + timeout
    request = JOIN.pack(place.rank, place.size) + os.fsencode(place.nonce)
    pause = 0.001
    logged = ""
    while True:
        reply = b""
        with ExitStack() as stack:
            peer = stack.enter_context(packet_socket())
            # Refused, busy or disconnected: rank 0 does not listen yet. No call waits for an abstract address, so poll.
            with suppress(ConnectionError, BlockingIOError, TimeoutError):
                peer.settimeout(max(pause, deadline - time.monotonic()))
                peer.connect(address)
                reason = untrusted_reason(peer)
                if not reason:
                    peer.send(request)
                    reply = peer.recv(MESSAGE_BYTES)
                elif reason != logged:
                    log.warning("refused to join: %s", reason)
                    logged = reason
            kind, _, text = reply.partition(b"\0")
            if kind == b"failure":
                raise decode_error(text)
            if kind == b"refused":
                raise ArgumentError(f"rank 0 refused this process: {text.decode()}", rank=place.rank)
            if kind == b"joined":
                stack.pop_all()
                return peer
        if time.monotonic() + pause > deadline:
            raise arrival_timeout([0], place.size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)  # short beside the start of an interpreter


def format_ranks(numbers: Collection[int]) -> str:
    """Return "rank 2", "ranks 2 and 3" or "ranks 1, 2 and 5"."""
    *first, last = map(str, sorted(numbers))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def arrival_timeout(absent: Collection[int], size: int, timeout: float) -> CollectiveTimeout:
    """Return the error that names the ranks that did not join."""
    return CollectiveTimeout(f"{format_ranks(absent)} of {size} did not arrive within {timeout:g} s", rank=min(absent))


def _key_timeout(key: str, timeout: float) -> CollectiveTimeout:
    return CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
