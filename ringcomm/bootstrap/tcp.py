"""TCP connections between the hosts of a job. Each end proves that it knows the secret of the job before it is heard.

    server → client    a greeting, a challenge
    client → server    a challenge, HMAC-SHA256(secret, "client", both challenges)
    server → client    HMAC-SHA256(secret, "server", both challenges), or "refused"

Nothing is encrypted, then or later.
"""

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from ringcomm.bootstrap.server import PeerServer
from ringcomm.errors import ArgumentError, refuse

__all__ = [
    "KEEPALIVE",
    "MESSAGE_OF_HANDSHAKE",
    "MessageSocket",
    "TcpServer",
    "dial",
    "hang_up",
    "introduce",
    "split_address",
]

KEEPALIVE = 15.0  # seconds after which a host that does not answer is lost; `run --help` documents it
GREETING = b"ringcomm store\n"
REFUSED = b"refused"
CHALLENGE_BYTES, PROOF_BYTES = 32, 32
MESSAGE_OF_HANDSHAKE = 64  # bytes, at most
MAX_STRANGERS = 128  # connections that have not proved anything yet
PATIENCE = 5.0  # seconds for that
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
        probe = max(1, int(keepalive / 3))  # seconds
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(keepalive * 1000)),
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


class _WrongSecret(ConnectionError):
    """The server has refused the proof of this process."""


class _Stranger(NamedTuple):
    challenge: bytes
    deadline: float


class TcpServer(PeerServer):
    """A PeerServer at one TCP address, for peers that know the secret.

    Strangers have PATIENCE seconds to prove that they do, and MAX_STRANGERS connections: of more, the oldest goes.
    """

    def __init__(
        self,
        address: str,
        purpose: str,
        receive: Callable[[socket.socket], object],
        rank: int | None,
        secret: bytes,
        keepalive: float | None,
    ) -> None:
        self._secret, self._keepalive, self._receive_member = secret, keepalive, receive
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order of their deadlines
        super().__init__(address, purpose, self._hear, rank)

    @property
    def address(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"{host}:{port}"

    def _listen(self, address: str, purpose: str) -> socket.socket:
        return _listen(address, purpose)

    def serve(self, timeout: float | None) -> bool:
        first = next(iter(self._strangers.values()), None)
        if first:
            left = max(0.0, first.deadline - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        served = super().serve(timeout)
        while self._strangers and next(iter(self._strangers.values())).deadline <= time.monotonic():
            self.refuse(next(iter(self._strangers)), f"no proof of the secret within {PATIENCE:g} s")
        return served

    def describe(self, peer: socket.socket) -> str:
        try:
            return "{} port {}".format(*peer.getpeername())
        except OSError:
            return "a connection"

    def drop(self, peer: socket.socket) -> None:
        self._strangers.pop(peer, None)
        super().drop(peer)

    def _admit(self, peer: socket.socket) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self.refuse(next(iter(self._strangers)), f"{MAX_STRANGERS} connections without a proof of the secret")
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer = MessageSocket(peer, self._keepalive)
            self.add(peer)
            self._strangers[peer] = _Stranger(challenge, time.monotonic() + PATIENCE)
            peer.send(GREETING + challenge)

    def _hear(self, peer: socket.socket) -> None:
        if peer not in self._strangers:
            self._receive_member(peer)
            return
        try:
            answer = peer.recv(CHALLENGE_BYTES + PROOF_BYTES)
        except BlockingIOError:
            return
        except OSError:  # too long, or disconnected
            answer = b""
        challenges = self._strangers[peer].challenge + answer[:CHALLENGE_BYTES]
        known = hmac.compare_digest(answer[CHALLENGE_BYTES:], _proof(self._secret, b"client", challenges))
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer.send(_proof(self._secret, b"server", challenges) if known else REFUSED)
        if known:
            del self._strangers[peer]
        else:
            self.refuse(peer, "it sent a wrong secret" if len(answer) > CHALLENGE_BYTES else "it sent no secret")


def dial(address: str, secret: bytes, seconds: float, keepalive: float = KEEPALIVE) -> MessageSocket:
    """Return a connection to the TcpServer at this address, whose send and recv then wait up to `seconds`.

    Raises ConnectionError if there is none that answers as it should, ArgumentError if it has another secret.
    """
    seconds = min(seconds, PATIENCE)
    try:
        connected = socket.create_connection(split_address(address), seconds)
        if connected.getsockname() == connected.getpeername():  # TCP connects a free local port to itself
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        peer = MessageSocket(connected, keepalive)
    except (OSError, UnicodeError) as error:  # no route, no such name, too slow, …
        raise ConnectionError(getattr(error, "strerror", "") or str(error)) from None
    try:
        steps = introduce(secret)
        next(steps)
        with suppress(StopIteration):
            while True:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
        return peer
    except OSError as error:
        peer.close()
        if isinstance(error, _WrongSecret):
            raise ArgumentError(f"the store at {address} has another secret than this process") from None
        if isinstance(error, ConnectionError):
            raise
        raise ConnectionError(error.strerror or str(error)) from None


def introduce(secret: bytes) -> Generator[bytes, bytes, None]:
    """Take the client's part of the handshake: each yield gives a message for the server, after the first, and receives
    the one of the server that comes next.

    Raises ConnectionError if the server does not answer as it should.
    """
    greeting = _not_closed((yield b""))
    if not greeting.startswith(GREETING):
        raise ConnectionError("what listens there is no ringcomm server")
    challenge = greeting.removeprefix(GREETING)
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    answer = _not_closed((yield mine + _proof(secret, b"client", challenge + mine)))
    if answer == REFUSED:
        raise _WrongSecret("it has another secret than this process")
    if not hmac.compare_digest(answer, _proof(secret, b"server", challenge + mine)):
        raise ConnectionError("what listens there does not know the secret")


def _not_closed(message: bytes) -> bytes:
    if not message:
        raise ConnectionResetError("it closed the connection")
    return message


def hang_up(peer: socket.socket) -> None:
    """Close a connection once the server has read what was sent: closing with unread data would discard that."""
    with suppress(OSError):
        peer.settimeout(1.0)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass
    peer.close()


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _proof(secret: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, role + challenges, "sha256")


def _listen(address: str, purpose: str) -> socket.socket:
    """Return a non-blocking socket that listens at this address, and at no other."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ArgumentError(
            f"{purpose}: cannot find the address of {host!r}: {getattr(error, 'strerror', error)}"
        ) from None
    found = ip_address(str(resolved[0]).partition("%")[0])
    if (getattr(found, "ipv4_mapped", None) or found).is_unspecified:
        raise refuse(purpose, "one address of this machine, not all", repr(host))
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a job that has just ended
        listener.bind(resolved)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ArgumentError(f"{purpose}: cannot listen at {address}: {error.strerror}") from None
    return listener
