"""TCP connections that keep the boundaries of messages, and notice a host that is gone."""

import errno
import os
import socket
import struct
from contextlib import suppress

from ringcomm.bootstrap.keepalive import patience_with, probe

__all__ = ["MessageSocket", "hang_up"]

LENGTH = struct.Struct("!I")


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
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass
    peer.close()
