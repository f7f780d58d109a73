"""The serving side of TCP: it listens at one address, and hears those that have proved that they know the secret."""

import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from ringcomm.bootstrap.handshake import HANDSHAKE_TIMEOUT, MESSAGE_OF_HANDSHAKE, ServerHandshake
from ringcomm.bootstrap.keepalive import PROBE_AGAIN, probe_now
from ringcomm.bootstrap.messagesocket import MessageSocket
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.tcp import split_address
from ringcomm.errors import ArgumentError, refuse

__all__ = ["TcpServer"]

MAX_UNTRUSTED = 128  # peers that have not proved that they know the secret


class _UntrustedPeer(NamedTuple):
    handshake: ServerHandshake
    deadline: float


class TcpServer(PeerServer):
    """A PeerServer at one TCP address, for peers that know the secret.

    Untrusted peers have HANDSHAKE_TIMEOUT seconds to prove that they do, and MAX_UNTRUSTED connections: of more, the
    oldest goes.
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
        self._untrusted: dict[socket.socket, _UntrustedPeer] = {}  # in the order of their deadlines
        self._probe_at = math.inf if keepalive is None else 0.0
        super().__init__(address, purpose, self._hear, rank)

    @property
    def address(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"{host}:{port}"

    def _listen(self, address: str, purpose: str) -> socket.socket:
        return _listen(address, purpose)

    def serve(self, timeout: float | None) -> bool:
        first = next(iter(self._untrusted.values()), None)
        due = min(first.deadline if first else math.inf, self._probe_at if self._peers else math.inf)
        left = max(0.0, due - time.monotonic())
        if left < math.inf:
            timeout = left if timeout is None else min(timeout, left)
        served = super().serve(timeout)
        if time.monotonic() >= self._probe_at:
            again = [probe_now(peer) for peer in self._peers if isinstance(peer, MessageSocket)]
            self._probe_at = time.monotonic() + min(again, default=PROBE_AGAIN)
        while self._untrusted and next(iter(self._untrusted.values())).deadline <= time.monotonic():
            self.refuse(next(iter(self._untrusted)), f"no proof of the secret within {HANDSHAKE_TIMEOUT:g} s")
        return served

    def describe(self, peer: socket.socket) -> str:
        try:
            return "{} port {}".format(*peer.getpeername())
        except OSError:
            return "a connection"

    def drop(self, peer: socket.socket) -> None:
        self._untrusted.pop(peer, None)
        super().drop(peer)

    def _admit(self, peer: socket.socket) -> None:
        if len(self._untrusted) >= MAX_UNTRUSTED:
            self.refuse(next(iter(self._untrusted)), f"{MAX_UNTRUSTED} connections without a proof of the secret")
        handshake = ServerHandshake(self._secret)
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer = MessageSocket(peer, self._keepalive)
            self.add(peer)
            self._untrusted[peer] = _UntrustedPeer(handshake, time.monotonic() + HANDSHAKE_TIMEOUT)
            peer.send(handshake.greeting)

    def _hear(self, peer: socket.socket) -> None:
        if peer not in self._untrusted:
            self._receive_member(peer)
            return
        try:
            message = peer.recv(MESSAGE_OF_HANDSHAKE)
        except BlockingIOError:
            return
        except OSError:  # too long, or disconnected
            message = b""
        answer, refusal = self._untrusted[peer].handshake.answer(message)
        with suppress(OSError):  # it has disconnected; the next read reports that
            peer.send(answer)
        if refusal:
            self.refuse(peer, refusal)
        else:
            del self._untrusted[peer]


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
