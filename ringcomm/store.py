"""The store at which the ranks of a start meet: values under names, or the reason why the start has failed."""

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

from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError, packed, refuse, unpacked
from ringcomm.place import Place
from ringcomm.sockets import MESSAGE_BYTES, packet_socket, stranger
from ringcomm.storeserver import ALWAYS, HELLO, LINGER, Server

__all__ = ["HashStore", "SocketStore", "Store", "late", "meeting", "open_store", "shared_failure"]

log = logging.getLogger("ringcomm")

_starts = itertools.count()


class Store(Protocol):
    """What the ranks of a start share before they share memory."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until some rank has set `key`; raise CollectiveTimeout after `timeout` seconds.

        Raises what a rank has aborted the start with, as soon as that has happened, also where `key` is set.
        """

    def abort(self, error: RingcommError) -> None:
        """End the start for all ranks: `get` and `check` raise `error` from now on. The first counts."""

    def check(self) -> None:
        """Raise what a rank has aborted the start with, if one has."""


class HashStore:
    """The store of ranks that are threads of one process."""

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
            there = self._changed.wait_for(lambda: self._failure or key in self._values, timeout)
            self.check()
            if not there:
                raise _unset(key, timeout)
            return self._values[key]

    def abort(self, error: RingcommError) -> None:
        with self._changed:
            self._failure = self._failure or packed(error).encode()
            self._changed.notify_all()

    def check(self) -> None:
        if self._failure:
            raise unpacked(self._failure)


class SocketStore:
    """The store of ranks that are processes of one host: a socket named from user and job, served by rank 0.

    The constructor returns when this rank has joined. It raises ArgumentError where rank 0 refuses it: because another
    process came as the same rank, with another size, or without the nonce.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        digest = hashlib.sha256(place.job.encode()).hexdigest()
        address = f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
        self._size = place.size
        self._server = Server(place, address) if place.rank == 0 else None
        self._socket = self._server.client if self._server else _join(place, address, timeout)

    def set(self, key: str, value: bytes) -> None:
        self._send(f"set\0{key}\0".encode() + value)

    def get(self, key: str, timeout: float) -> bytes:
        self._send(f"get\0{timeout}\0{key}".encode())
        self._socket.settimeout(timeout + LINGER)  # rank 0 keeps the time: it knows who is missing
        try:
            kind, _, value = self._socket.recv(MESSAGE_BYTES).partition(b"\0")
        except TimeoutError:
            raise CollectiveTimeout(f"rank 0 did not answer within {timeout:g} s", rank=0) from None
        except ConnectionResetError:
            kind = value = b""
        if kind == b"value":
            return value
        if kind == b"failure":
            raise unpacked(value)
        if kind == b"absent":
            absent = json.loads(value)
            raise late(absent, self._size, timeout) if absent else _unset(key, timeout)
        raise PeerLost("rank 0 has left the start", rank=0)

    def abort(self, error: RingcommError) -> None:
        with suppress(PeerLost):  # nobody is left to be told
            self._send(b"abort\0" + packed(error).encode())

    def check(self) -> None:
        self.get(ALWAYS, timeout=0)

    def close(self) -> None:
        """Say goodbye. Rank 0 waits until the others have done so too, as they may still ask for something."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy of this socket
        self._socket.close()
        if self._server:
            self._server.join()

    def _send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise refuse("a message to the store", f"at most {MESSAGE_BYTES} bytes", len(message))
        try:
            self._socket.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerLost("rank 0 has left the start", rank=0) from None


@contextmanager
def open_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of a start, which fails for all ranks if the body fails on one.

    Every rank counts its starts, so that a second one does not meet the first.
    """
    with meeting(replace(place, job=f"{place.job}#{next(_starts)}"), timeout) as store:
        yield store


@contextmanager
def meeting(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of those who have the job of this place to themselves."""
    if place.size == 1:
        yield HashStore()
        return
    store = SocketStore(place, timeout)
    with closing(store), shared_failure(store, place.rank):
        yield store


@contextmanager
def shared_failure(store: Store, rank: int) -> Iterator[None]:
    """Let what the body raises on this rank abort the start of all."""
    try:
        yield
    except RingcommError as error:
        store.abort(error)
        raise
    except BaseException as error:
        store.abort(Aborted(f"rank {rank} ended the start: {error!r}", rank=rank))
        raise


def _join(place: Place, address: str, timeout: float) -> socket.socket:
    """Connect to rank 0 as soon as it is there."""
    deadline = time.monotonic() + timeout
    hello = HELLO.pack(place.rank, place.size) + os.fsencode(place.nonce)
    pause = 0.001
    seen = ""
    while True:
        # Refused, busy or hung up: rank 0 is not there yet. An abstract address cannot be waited for, so try again.
        with suppress(ConnectionError, BlockingIOError, TimeoutError), ExitStack() as stack:
            peer = stack.enter_context(packet_socket())
            peer.settimeout(max(pause, deadline - time.monotonic()))
            peer.connect(address)
            reason = stranger(peer)
            if not reason:
                peer.send(hello)
                kind, _, text = peer.recv(MESSAGE_BYTES).partition(b"\0")
                if kind == b"refused":
                    raise ArgumentError(f"rank 0 refused this process: {text.decode()}", rank=place.rank)
                if kind == b"welcome":
                    stack.pop_all()
                    return peer
            elif reason != seen:
                log.warning("refused to join: %s", reason)
                seen = reason
        if time.monotonic() + pause > deadline:
            raise late([0], place.size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)  # little beside the start of an interpreter


def ranks(numbers: Collection[int]) -> str:
    """Return "rank 2", "ranks 2 and 3" or "ranks 1, 2 and 5"."""
    *first, last = map(str, sorted(numbers))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def late(absent: Collection[int], size: int, timeout: float) -> CollectiveTimeout:
    """Return the error that names who did not come to the start."""
    return CollectiveTimeout(f"{ranks(absent)} of {size} did not arrive within {timeout:g} s", rank=min(absent))


def _unset(key: str, timeout: float) -> CollectiveTimeout:
    return CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
