"""Messages: sockets that keep their boundaries, and their form, which is a kind with typed fields and a payload."""

import errno
import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple

from ringcomm.bootstrap.wire.keepalive import patience_with, probe
from ringcomm.errors import RingcommError, decode_error, encode_error

__all__ = [
    "ENDED",
    "MESSAGE_BYTES",
    "Frame",
    "MessageSocket",
    "broken",
    "decode",
    "encode",
    "encode_failure",
    "failure_of",
    "hang_up",
]

MESSAGE_BYTES = 64 << 10  # longest message: more than startup needs, less than the kernel's socket buffer
LENGTH = struct.Struct("!I")
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


class MessageSocket(socket.socket):
    """A TCP socket that keeps the boundaries of messages, as SOCK_SEQPACKET does.

    A peer that does not answer for `keepalive` seconds, because its host or the network has failed, is lost. None
    leaves the socket as it is, for a connection that will carry other data.
    """

    def __init__(self, connected: socket.socket, keepalive: float | None) -> None:
        timeout = connected.gettimeout()
        super().__init__(fileno=connected.detach())
        self.settimeout(timeout)
        self._received = bytearray()
        if keepalive is None:
            return
        probe(self, keepalive)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_with(keepalive).resending)),
            (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18),  # any one message, so that a send need not wait
        ):
            self.setsockopt(level, option, value)

    def send(self, data: bytes, _: int = 0, /) -> int:  # type: ignore[override]
        message = LENGTH.pack(len(data)) + data
        if (sent := super().send(message)) < len(message):
            if self.gettimeout() == 0:
                self.shutdown(socket.SHUT_RDWR)  # the rest would come too late; the peer must not wait for it
                raise BrokenPipeError(errno.EPIPE, "the peer does not read")
            self.sendall(message[sent:])
        return len(data)

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
            data = super().recv(count - len(self._received))
            if not data:
                return False
            self._received += data
        return True


def hang_up(peer: socket.socket) -> None:
    """Close a connection once the server has read what was sent: closing with unread data would discard that."""
    with suppress(OSError):
        peer.settimeout(1.0)
        peer.shutdown(socket.SHUT_WR)  # a forked child may hold a copy of this socket
        while peer.recv(MESSAGE_BYTES):
            pass
    peer.close()


def broken(error: OSError) -> str:
    """Say how the other end of a connection was lost."""
    unreachable = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return SILENT if error.errno in unreachable else ENDED
