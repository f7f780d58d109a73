"""Unix sockets between processes of one host: messages with file descriptors, and the credentials of the peer."""

import array
import errno
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from ringcomm.bootstrap.wire.framing import LENGTH, MessageSocket
from ringcomm.bootstrap.wire.peers import WAITING, Gate
from ringcomm.errors import ArgumentError, RingcommError

__all__ = [
    "MAX_DESCRIPTORS",
    "DescriptorSocket",
    "UnixGate",
    "close_descriptors",
    "connect",
    "credentials",
    "public_address",
    "user_address",
]

MAX_DESCRIPTORS = 250  # per message; the kernel allows 253

Socket = TypeVar("Socket", bound=MessageSocket)


def public_address(name: str) -> str:
    """Return the abstract address at which something of this name is served to the processes of this user.

    Every user can list the addresses, and so sees the name.
    """
    return f"\0ringcomm-{os.geteuid()}-{name}"


def user_address(name: str) -> str:
    """Return the same for a name of any length, which may be secret."""
    import hashlib  # and with it OpenSSL: ranks whose launcher serves the store do without

    return public_address(hashlib.sha256(os.fsencode(name)).hexdigest()[:32])


def connect(address: str, seconds: float, kind: type[Socket]) -> Socket:
    """Return a connection to the server of this user at the abstract `address`.

    Raises BlockingIOError while too many others wait to be admitted, RingcommError if another user listens there.
    """
    with ExitStack() as failed:
        peer = kind(socket.socket(socket.AF_UNIX))
        failed.enter_context(peer)
        peer.settimeout(seconds)
        peer.connect(address)
        if reason := _untrusted_reason(peer):
            raise RingcommError(f"refused to connect: {reason}")
        failed.pop_all()
    return peer


class UnixGate(Gate):
    """Listens at an abstract address, and admits the processes of this user."""

    def __init__(self, address: str, purpose: str, kind: type[MessageSocket] = MessageSocket) -> None:
        super().__init__(_listen(address, purpose))
        self._kind = kind

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        reason = _untrusted_reason(peer)
        return None if reason else self._kind(peer), reason

    def describe(self, peer: socket.socket) -> str:
        return f"process {credentials(peer)[0]}"


def _listen(address: str, purpose: str) -> socket.socket:
    """Return a non-blocking socket that listens at the abstract `address`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    try:
        listener.bind(address)
        listener.listen(WAITING)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ArgumentError(f"{purpose} is already taken by {_holder(address)}", rank=0) from None
        raise
    return listener


def credentials(peer: socket.socket) -> tuple[int, int]:
    """Return the process id (0: another pid namespace) and the user id of the peer."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def _untrusted_reason(peer: socket.socket) -> str:
    """Return why the peer cannot be trusted; empty if it runs as this user."""
    pid, uid = credentials(peer)
    return "" if uid == os.geteuid() else f"process {pid} belongs to user {uid}, not to user {os.geteuid()}"


class DescriptorSocket(MessageSocket):
    """Passes file descriptors beside its messages.

    Attributes:
        fds: those that have come, until `take_fds`
        dropped: some have not, because this process could not take more
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.fds: list[int] = []
        self.dropped = False

    def send_fds(self, message: bytes, fds: Sequence[int]) -> None:
        """Send a message with up to MAX_DESCRIPTORS descriptors; wait as long as the timeout of this socket."""
        data, deadline = LENGTH.pack(len(message)) + message, time.monotonic() + (self.gettimeout() or 0)
        while True:
            try:
                sent = socket.send_fds(self, [data], fds)
                break
            except OSError as error:
                # The kernel limits a user's descriptors in flight; the count falls as the other ranks receive theirs.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
        if rest := data[sent:]:
            self.sendall(rest)

    def take_fds(self) -> list[int]:
        """Return the descriptors that have come; the caller owns them from now on."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        close_descriptors(self.take_fds())
        super().close()

    def _read(self, count: int) -> bytes:
        # Not socket.recv_fds: it ignores MSG_CMSG_CLOEXEC.
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self.recvmsg(count, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.fds += fds
        self.dropped |= bool(flags & socket.MSG_CTRUNC)
        return data


def close_descriptors(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _holder(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        try:
            peer.connect(address)
        except OSError:
            return "another process"
        pid, uid = credentials(peer)
        return f"process {pid} of user {uid}"
