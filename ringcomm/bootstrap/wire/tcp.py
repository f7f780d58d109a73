"""TCP between hosts: both ends prove that they know the secret of the job before they are heard."""

import errno
import math
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import NamedTuple

from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import (
    HANDSHAKE_TIMEOUT,
    MESSAGE_OF_HANDSHAKE,
    ServerHandshake,
    WrongSecret,
    client_handshake,
)
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE, PROBE_AGAIN, patience_with, probe, probe_now
from ringcomm.bootstrap.wire.peers import WAITING, Gate
from ringcomm.bootstrap.wire.tls import TlsFailure, TlsIdentity
from ringcomm.errors import ArgumentError, refuse
from ringcomm.machine import descriptors

__all__ = [
    "TcpGate",
    "begin_to_connect",
    "connect",
    "is_established",
    "local_address",
    "loopback",
    "split_address",
    "unreachable",
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
        raise kind(getattr(error, "strerror", "") or str(error)) from None
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
            peer.bind((source, 0))
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


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def local_address(server: str) -> str:
    """Return the address from which this host reaches that server, `host:port`. Nothing is sent."""
    host, port = split_address(server)
    family, _, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as probing:
        probing.connect(resolved)
        return str(probing.getsockname()[0])


def loopback(host: str) -> str:
    """Return the address that the name stands for if only this host reaches it, else ""."""
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # who listens there will say so
        return ""
    return found if ip_address(found.partition("%")[0]).is_loopback else ""


def unreachable(rank: int, address: str, found: str) -> ArgumentError:
    """Return the error of a rank whose address no other host reaches; `found`: the one that it stands for, or ""."""
    at = f"{found}, the address of {address!r}" if found else repr(address)
    text = f"rank {rank}: the other hosts cannot reach this one at {at}"
    return ArgumentError(f"{text}: set RINGCOMM_HOST_ADDRESS to one that they reach", rank=rank)


class _UntrustedPeer(NamedTuple):
    handshake: ServerHandshake
    since: float


class TcpGate(Gate):
    """Listens at a TCP address, or several, and admits peers that know the secret.

    Untrusted peers have HANDSHAKE_TIMEOUT seconds to prove that they do, and MAX_UNTRUSTED connections. Others wait
    until one has proved it; after GRACE seconds the oldest goes.
    """

    def __init__(
        self,
        address: str,
        purpose: str,
        secret: bytes,
        keepalive: float | None,
        *others: str,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._secret, self._keepalive, self._tls = secret, keepalive, tls
        self._untrusted: dict[MessageSocket, _UntrustedPeer] = {}  # the oldest first
        self._probe_at = math.inf if keepalive is None else 0.0
        super().__init__(*_listen_at([address, *others], purpose))

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        names = [listener.getsockname() for listener in self.listeners]
        return [f"{host}:{port}" for host, port, *_ in names]

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        handshake = ServerHandshake(self._secret, bool(self._tls))
        try:
            if self._keepalive is not None:
                _watch(peer, self._keepalive)
            heard = MessageSocket(peer)
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
            del self._untrusted[peer]
        return False, refusal

    def room(self) -> int:
        return MAX_UNTRUSTED - len(self._untrusted) or int(self._oldest() + GRACE <= time.monotonic())

    def due(self) -> float:
        return min(self._oldest() + (HANDSHAKE_TIMEOUT if self.room() else GRACE), self._probe_at)

    def _oldest(self) -> float:
        return next((peer.since for peer in self._untrusted.values()), math.inf)

    def poll(self, peers: Collection[MessageSocket]) -> tuple[MessageSocket, str] | None:
        now = time.monotonic()
        if now >= self._probe_at:
            again = [probe_now(peer) for peer in peers]
            self._probe_at = now + min(again, default=PROBE_AGAIN)
        for peer, untrusted in self._untrusted.items():  # the oldest
            if len(self._untrusted) > MAX_UNTRUSTED:
                return peer, f"{MAX_UNTRUSTED} connections without a proof of the secret"
            if untrusted.since + HANDSHAKE_TIMEOUT <= now:
                return peer, f"no proof of the secret within {HANDSHAKE_TIMEOUT:g} s"
            break
        return None

    def forget(self, peer: MessageSocket) -> None:
        self._untrusted.pop(peer, None)


def _listen_at(addresses: Sequence[str], purpose: str) -> list[socket.socket]:
    with ExitStack() as failed:
        listeners = [failed.enter_context(_listen(address, purpose)) for address in addresses]
        failed.pop_all()
    return listeners


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
        listener.listen(WAITING)
    except OSError as error:
        listener.close()
        raise ArgumentError(f"{purpose}: cannot listen at {address}: {error.strerror}") from None
    return listener
