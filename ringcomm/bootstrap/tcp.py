"""The connecting side of TCP: to the server at an address, which must prove that it knows the secret."""

import errno
import os
import socket
from contextlib import suppress

from ringcomm.bootstrap.handshake import HANDSHAKE_TIMEOUT, MESSAGE_OF_HANDSHAKE, WrongSecret, client_handshake
from ringcomm.bootstrap.keepalive import KEEPALIVE
from ringcomm.bootstrap.messagesocket import MessageSocket
from ringcomm.errors import ArgumentError

__all__ = ["connect", "split_address"]


def connect(address: str, secret: bytes, seconds: float, keepalive: float = KEEPALIVE) -> MessageSocket:
    """Return a connection to the TcpServer at this address, whose send and recv then wait up to `seconds`.

    Raises ConnectionRefusedError if nothing listens there, another ConnectionError if no server answers as it should,
    ArgumentError if it has another secret.
    """
    seconds = min(seconds, HANDSHAKE_TIMEOUT)
    try:
        connected = socket.create_connection(split_address(address), seconds)
        if connected.getsockname() == connected.getpeername():  # TCP connects a free local port to itself
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        peer = MessageSocket(connected, keepalive)
    except (OSError, UnicodeError) as error:  # no route, no such name, too slow, …
        kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else ConnectionError
        raise kind(getattr(error, "strerror", "") or str(error)) from None
    try:
        steps = client_handshake(secret)
        next(steps)
        with suppress(StopIteration):
            while True:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
        return peer
    except OSError as error:
        peer.close()
        if isinstance(error, WrongSecret):
            raise ArgumentError(f"the store at {address} has another secret than this process") from None
        if isinstance(error, ConnectionError):
            raise
        raise ConnectionError(error.strerror or str(error)) from None


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
