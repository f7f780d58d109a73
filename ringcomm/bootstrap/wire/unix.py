"""Unix sockets between processes of one host: packets with file descriptors, and the credentials of the peer."""

import array
import errno
import hashlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

from ringcomm.bootstrap.wire.framing import MESSAGE_BYTES
from ringcomm.errors import ArgumentError, refuse
from ringcomm.machine import descriptors

__all__ = [
    "MAX_DESCRIPTORS",
    "Facts",
    "Packet",
    "UnixGate",
    "UntrustedServer",
    "close_descriptors",
    "close_in_children",
    "connect",
    "credentials",
    "packet_socket",
    "receive_packet",
    "send_packet",
    "untrusted_reason",
    "user_address",
]

MAX_DESCRIPTORS = 250  # per message; the kernel allows 253

Facts = dict[str, Any]  # what a packet says


def packet_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def user_address(name: str) -> str:
    """Return the abstract address at which something of this name is served to the processes of this user."""
    return f"\0ringcomm-{os.geteuid()}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"


class UntrustedServer(ConnectionError):
    """A process of another user listens at the address."""


def connect(address: str, seconds: float) -> socket.socket:
    """Return a connection to the server of this user at the abstract `address`."""
    with ExitStack() as failed:
        peer = failed.enter_context(packet_socket())
        peer.settimeout(seconds)
        peer.connect(address)
        if reason := untrusted_reason(peer):
            raise UntrustedServer(reason)
        failed.pop_all()
    return peer


class UnixGate:
    """Listens at an abstract address, and admits the processes of this user. See peers.Gate."""

    def __init__(self, address: str, purpose: str) -> None:
        self.listener = _listen(address, purpose)

    def greet(self, peer: socket.socket) -> tuple[socket.socket | None, str]:
        return peer, untrusted_reason(peer)

    def admits(self, _: socket.socket) -> tuple[bool, str]:
        return True, ""

    def due(self) -> float:
        return math.inf

    def poll(self, _: Collection[socket.socket]) -> None:
        return None

    def forget(self, peer: socket.socket) -> None: ...

    def describe(self, peer: socket.socket) -> str:
        return f"process {credentials(peer)[0]}"


def _listen(address: str, purpose: str) -> socket.socket:
    """Return a non-blocking socket that listens at the abstract `address`."""
    listener = packet_socket()
    listener.setblocking(False)
    try:
        listener.bind(address)
        listener.listen(1024)
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


def untrusted_reason(peer: socket.socket) -> str:
    """Return why the peer cannot be trusted; empty if it runs as this user."""
    pid, uid = credentials(peer)
    return "" if uid == os.geteuid() else f"process {pid} belongs to user {uid}, not to user {os.geteuid()}"


class Packet(NamedTuple):
    """One received message; no data means that the peer has closed the connection."""

    data: bytes
    fds: list[int]
    complete: bool  # no descriptor was dropped

    def read(self, rank: int) -> Facts:
        """Parse a message of an authenticated peer that has come to `rank`."""
        if not self.complete:
            close_descriptors(self.fds)
            raise descriptors.exhausted(rank, "to receive those of the other ranks")
        message: Facts = json.loads(self.data)
        return message


def send_packet(peer: socket.socket, message: Facts, fds: Sequence[int] = (), prefix: bytes = b"") -> None:
    data = prefix + json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise refuse("a startup message", f"at most {MESSAGE_BYTES} bytes", len(data))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    deadline = time.monotonic() + (peer.gettimeout() or 0)
    while True:
        try:
            peer.sendmsg([data], rights)
            return
        except OSError as error:
            # The kernel limits a user's descriptors in flight; the count falls as the other ranks receive theirs.
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def receive_packet(peer: socket.socket) -> Packet:
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The peer closed with unread data, which resets the connection once; its own messages are still queued.
        data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return Packet(data, list(fds), complete=not flags & socket.MSG_CTRUNC)


def close_descriptors(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def close_in_children(held: socket.socket) -> None:
    """Have forked children close their copy of a socket: they must not hold it longer than this process lives."""
    _closed_in_children.add(held)


def _close_in_child() -> None:
    for held in _closed_in_children:
        held.close()


_closed_in_children: "WeakSet[socket.socket]" = WeakSet()
if hasattr(os, "register_at_fork"):  # else another system, on which only --help works
    os.register_at_fork(after_in_child=_close_in_child)


def _holder(address: str) -> str:
    with packet_socket() as peer:
        peer.setblocking(False)
        try:
            peer.connect(address)
        except OSError:
            return "another process"
        pid, uid = credentials(peer)
        return f"process {pid} of user {uid}"
