"""Sockets between processes of one host: packets, so that a message is never cut, and who is on the other side."""

import errno
import os
import socket
import struct

from ringcomm.errors import ArgumentError

__all__ = ["MESSAGE_BYTES", "credentials", "listen", "packet_socket", "stranger"]

MESSAGE_BYTES = 64 << 10  # the longest message: more than a start needs, less than the kernel's buffer of a socket


def packet_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(address: str, purpose: str) -> socket.socket:
    """Return a socket that listens at the abstract `address`, without waiting in accept."""
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
    """Return the process id (0: of another pid namespace) and the user id of the other side."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def stranger(peer: socket.socket) -> str:
    """Return why the other side cannot be trusted; empty when it belongs to this user."""
    pid, uid = credentials(peer)
    return "" if uid == os.geteuid() else f"process {pid} belongs to user {uid}, not to user {os.geteuid()}"


def _holder(address: str) -> str:
    with packet_socket() as peer:
        peer.setblocking(False)
        try:
            peer.connect(address)
        except OSError:
            return "another process"
        pid, uid = credentials(peer)
        return f"process {pid} of user {uid}"
