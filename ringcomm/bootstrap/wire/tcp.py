"""TCP between hosts: both ends prove that they know the secret of the job before they are heard."""

import errno
import math
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ringcomm.bootstrap.wire.addresses import name_of, split_address
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import (
    HANDSHAKE_TIMEOUT,
    MESSAGE_OF_HANDSHAKE,
    ServerHandshake,
    WrongSecret,
    client_handshake,
)
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE, PROBE_AGAIN, patience_with, probe, probe_now
from ringcomm.bootstrap.wire.peers import Gate, Listener
from ringcomm.bootstrap.wire.tls import TlsFailure, TlsIdentity
from ringcomm.errors import ArgumentError
from ringcomm.machine import descriptors

__all__ = [
    "TcpGate",
    "TcpPeers",
    "begin_to_connect",
    "connect",
    "is_established",
]

MAX_UNTRUSTED = 128  # peers that have not proved that they know the secret
GRACE = 0.25  # seconds that each of them has while others wait to be accepted


def connect(
    address: str,
    secret: bytes,
    seconds: float,
    keepalive: float = KEEPALIVE,
    connect_timeout: float = HANDSHAKE_TIMEOUT,
    tls: TlsIdentity | None = None,
) -> MessageSocket:
    """Return a connection to the server at this address, whose send and recv then wait up to `seconds`.

    `connect_timeout`: the most seconds until that host answers, which a busy server does not delay.

    Raises ConnectionRefusedError if nothing listens there, another ConnectionError if no server answers as it should,
    TimeoutError if it takes too long for that, ArgumentError if it has another secret, or (of `tls`) TLS fails.
    """
    seconds = min(seconds, HANDSHAKE_TIMEOUT)
    try:
        connected = socket.create_connection(split_address(address), min(seconds, connect_timeout))
        connected.settimeout(seconds)
        if connected.getsockname() == connected.getpeername():  # TCP connects a free local port to itself
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        _watch(connected, keepalive)
        peer = MessageSocket(connected)
    except (OSError, UnicodeError) as error:  # no route, no such name, too slow, …
        kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else ConnectionError
        number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else getattr(error, "errno", None)
        raise kind(number, getattr(error, "strerror", "") or str(error)) from None
    try:
        steps = client_handshake(secret, peer, tls)
        next(steps)
        with suppress(StopIteration):
            while True:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
        return peer
    except OSError as error:
        peer.close()
        if isinstance(error, WrongSecret):
            raise ArgumentError(f"the store at {address} has another secret than this process") from None
        if isinstance(error, TlsFailure):
            raise ArgumentError(f"cannot connect to the store at {address}: {error}", argument="tls") from None
        if isinstance(error, ConnectionError | TimeoutError):
            raise
        raise ConnectionError(error.strerror or str(error)) from None


def begin_to_connect(address: str, keepalive: float, source: str = "") -> MessageSocket:
    """Return a socket that does not block, and probes the other host; that it cannot connect is read from it.

    `source`: the address of this host from which it connects; "": the one that leads there.
    """
    host, port = split_address(address)
    family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with ExitStack() as failed:
        peer = failed.enter_context(MessageSocket(_new_socket(family, kind, protocol)))
        peer.setblocking(False)
        probe(peer, keepalive)
        if source:
            ours, _, _, _, from_here = socket.getaddrinfo(source, 0, type=socket.SOCK_STREAM)[0]
            if ours == family:
                peer.bind(from_here)
        with suppress(BlockingIOError):
            peer.connect(resolved)
        failed.pop_all()
    return peer


def is_established(connecting: socket.socket) -> bool:
    """Return whether the other host has answered."""
    try:
        connecting.getpeername()
    except OSError:
        return False
    return True


def _new_socket(*kind: int) -> socket.socket:
    try:
        return socket.socket(*kind)
    except OSError as error:
        if error.errno != errno.EMFILE or not descriptors.raise_limit():
            raise
        return socket.socket(*kind)


def _watch(connected: socket.socket, keepalive: float) -> None:
    """Have TCP end a connection whose other end does not answer for `keepalive` seconds."""
    probe(connected, keepalive)
    limit = int(1000 * patience_with(keepalive).resending)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _UntrustedPeer(NamedTuple):
    handshake: ServerHandshake
    since: float


class TcpPeers(Gate):
    """Peers on other hosts. Those that do not answer for `keepalive` seconds are lost, unless that is None."""

    def __init__(self, keepalive: float | None, *listeners: Listener) -> None:
        super().__init__(*listeners)
        self._keepalive, self._probe_at = keepalive, math.inf if keepalive is None else 0.0

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        try:
            if self._keepalive is not None:
                _watch(peer, self._keepalive)
        except OSError:  # it has disconnected again
            return None, ""
        return peer if isinstance(peer, MessageSocket) else MessageSocket(peer), ""  # a shared port's has its TLS

    def due(self) -> float:
        return self._probe_at

    def poll(self, peers: Collection[MessageSocket]) -> tuple[MessageSocket, str] | None:
        now = time.monotonic()
        if now >= self._probe_at:
            again = [probe_now(peer) for peer in peers]
            self._probe_at = now + min(again, default=PROBE_AGAIN)
        return None


class TcpGate(TcpPeers):
    """Listens at TCP addresses, and admits peers that know one of the secrets.

    Untrusted peers have HANDSHAKE_TIMEOUT seconds to prove that they do, and MAX_UNTRUSTED connections. Others wait
    until one has proved it; after GRACE seconds the oldest goes.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secrets: Collection[bytes],
        keepalive: float | None,
        tls: TlsIdentity | None = None,
    ) -> None:
        super().__init__(keepalive, *listeners)
        self._secrets, self._tls = secrets, tls
        self._untrusted: dict[MessageSocket, _UntrustedPeer] = {}  # the oldest first
        self.addresses = [name_of(listener) for listener in listeners]

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        heard, reason = super().greet(peer)
        if heard is None:
            return None, reason
        handshake = ServerHandshake(self._secrets, bool(self._tls))
        try:
            heard.setblocking(False)
            heard.send(handshake.greeting)
            if self._tls:
                self._tls.secure(heard, accepts=True)
        except OSError:  # it has disconnected again
            return None, ""
        self._untrusted[heard] = _UntrustedPeer(handshake, time.monotonic())
        return heard, ""

    def admits(self, peer: MessageSocket) -> tuple[bool, str]:
        if peer not in self._untrusted:
            return True, ""
        try:
            message = peer.recv(MESSAGE_OF_HANDSHAKE)
        except BlockingIOError:
            return False, ""
        except TlsFailure as error:
            return False, str(error)
        except OSError:  # too long, or disconnected
            message = b""
        answer, refusal = self._untrusted[peer].handshake.answer(message)
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer.send(answer)
        if not refusal:
            proved = self._untrusted.pop(peer).handshake.proved
            self.proved(peer, proved)
        return False, refusal

    def proved(self, peer: MessageSocket, secret: bytes) -> None:
        """Note that a peer has proved this secret."""

    def room(self) -> int:
        return MAX_UNTRUSTED - len(self._untrusted) or int(self._oldest() + GRACE <= time.monotonic())

    def due(self) -> float:
        return min(self._oldest() + (HANDSHAKE_TIMEOUT if self.room() else GRACE), super().due())

    def _oldest(self) -> float:
        return next((peer.since for peer in self._untrusted.values()), math.inf)

    def poll(self, peers: Collection[MessageSocket]) -> tuple[MessageSocket, str] | None:
        super().poll(peers)
        now = time.monotonic()
        for peer, untrusted in self._untrusted.items():  # the oldest
            if len(self._untrusted) > MAX_UNTRUSTED:
                return peer, f"{MAX_UNTRUSTED} connections without a proof of the secret"
            if untrusted.since + HANDSHAKE_TIMEOUT <= now:
                return peer, f"no proof of the secret within {HANDSHAKE_TIMEOUT:g} s"
            break
        return None

    def forget(self, peer: MessageSocket) -> None:
        self._untrusted.pop(peer, None)
