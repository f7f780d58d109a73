"""Messages: a stream socket that keeps their boundaries, and their form: a kind with typed fields, and a payload."""

import errno
import json
import math
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from ringcomm.errors import RingcommError, decode_error, encode_error

__all__ = [
    "ENDED",
    "HELLO_BYTES",
    "MESSAGE_BYTES",
    "Frame",
    "MessageSocket",
    "broken",
    "close_in_children",
    "decode",
    "encode",
    "encode_failure",
    "failure_of",
    "hang_up",
]

LENGTH = struct.Struct("!I")
MESSAGE_BYTES = (1 << 32) - 1  # the longest message
HELLO_BYTES = 1 << 20  # the longest message of a peer that has not joined: it may name all ranks of a job
BLOCK_BYTES = 1 << 20  # read at once
ENDED, SILENT = "has ended", "does not answer"  # how the other end of a connection is lost


class Frame(NamedTuple):
    kind: str
    fields: dict[str, Any]
    payload: bytes


def encode(kind: str, payload: bytes = b"", /, **fields: object) -> bytes:
    """Return a message as bytes: one line of JSON, then the payload as it is."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n" + payload


def decode(data: bytes) -> Frame:
    """Return the message; raise ValueError if it is none."""
    header, _, payload = data.partition(b"\n")
    try:
        fields = json.loads(header)
        return Frame(str(fields.pop("kind")), fields, payload)
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(data[:100]) from error


def encode_failure(error: RingcommError, **fields: object) -> bytes:
    return encode("failure", encode_error(error).encode(), **fields)


def failure_of(message: Frame) -> RingcommError:
    """Return the error that a failure carries, with its facts."""
    return decode_error(message.payload)


class Channel(Protocol):
    """What a socket sends and receives through, without waiting: see tls.TlsChannel."""

    handle: Any

    def send(self, data: bytearray) -> int: ...

    def recv(self, count: int) -> bytes: ...

    def holds_received(self) -> bool: ...


class MessageSocket(socket.socket):
    """A connected stream socket that keeps the boundaries of messages.

    One that does not block keeps what the kernel has no room for; `flush` sends it.

    Attributes:
        channel: that of TLS, or None
    """

    def __init__(self, connected: socket.socket) -> None:
        timeout = connected.gettimeout()
        super().__init__(fileno=connected.detach())
        self.settimeout(timeout)
        self._received, self._unsent = bytearray(), bytearray()
        self.channel: Channel | None = None

    def send(self, data: bytes, _: int = 0, /) -> int:  # type: ignore[override]  # a message, not a part of it
        self._unsent += LENGTH.pack(len(data)) + data
        self.flush()
        return len(data)

    def flush(self) -> bool:
        """Send what is kept; return whether nothing is left."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._write(self._unsent)]
        return not self._unsent

    def recv(self, size: int, _: int = 0, /) -> bytes:
        """Return one message, or b"" at the end. Raise OSError if it is longer than `size`.

        Raises BlockingIOError or TimeoutError while it is incomplete; what has come is kept.
        """
        if not self._fill(LENGTH.size):
            return b""
        (length,) = LENGTH.unpack_from(self._received)
        if length > size:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if not self._fill(LENGTH.size + length):
            return b""
        message = bytes(self._received[LENGTH.size :])
        self._received.clear()
        return message

    def _fill(self, count: int) -> bool:
        while len(self._received) < count:
            data = self._read(min(count - len(self._received), BLOCK_BYTES))
            if not data:
                return False
            self._received += data
        return True

    def holds_received(self) -> bool:
        """Return whether something can be received although the socket need not be readable."""
        return self.channel is not None and self.channel.holds_received()

    def _write(self, data: bytearray) -> int:
        while self.channel:
            try:
                return self.channel.send(data)
            except BlockingIOError as blocked:
                self._wait(blocked, select.POLLIN if blocked.errno == errno.EINPROGRESS else select.POLLOUT)
        return super().send(data)

    def _read(self, count: int) -> bytes:
        while self.channel:
            try:
                return self.channel.recv(count)
            except BlockingIOError as blocked:
                self.flush()  # what has waited for the handshake
                self._wait(blocked, select.POLLIN)
        return super().recv(count)

    def _wait(self, blocked: BlockingIOError, event: int) -> None:
        """Wait, up to the timeout of this socket, until its channel can go on."""
        timeout = self.gettimeout()
        if timeout == 0:
            raise blocked
        ready = select.poll()
        ready.register(self, event)
        if not ready.poll(None if timeout is None else math.ceil(1000 * timeout)):
            raise TimeoutError("timed out")


def hang_up(peer: MessageSocket) -> None:
    """Close a connection once the server has read what was sent: closing with unread data would discard that."""
    with suppress(OSError):
        peer.settimeout(1.0)
        peer.shutdown(socket.SHUT_WR)  # a forked child may hold a copy of this socket
        while peer.recv(MESSAGE_BYTES):
            pass
    peer.close()


def broken(error: OSError) -> str:
    """Say how the other end of a connection was lost."""
    return SILENT if is_unreachable(error) else ENDED


def is_unreachable(error: OSError) -> bool:
    """Return whether the other host has not answered, or no way leads there."""
    return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Closable(Protocol):
    def close(self) -> None: ...


def close_in_children(held: Closable) -> None:
    """Have forked children close their copy of a socket: they must not hold it longer than this process lives."""
    _closed_in_children.add(held)


def _close_in_child() -> None:
    for held in _closed_in_children:
        held.close()


_closed_in_children: "WeakSet[Closable]" = WeakSet()
if hasattr(os, "register_at_fork"):  # else another system, on which only --help works
    os.register_at_fork(after_in_child=_close_in_child)
