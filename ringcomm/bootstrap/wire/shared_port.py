"""The port of this process at one of its addresses, at which others reach all servers of the process.

RINGCOMM_PORT_RANGE leaves a process one port, but it has a server for each start and each group between hosts. So a
thread accepts peers at the port, and hands each, with its TLS, to the server whose secret it has proved. The port is
open as long as any server is reached there.

A server may be closed by the garbage collector, in any thread: so nothing that closes one takes a lock or waits.
"""

import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self
from weakref import ref

from ringcomm.bootstrap.wire.addresses import Reach, listen, listen_at, name_of
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.tcp import TcpGate, TcpPeers
from ringcomm.bootstrap.wire.tls import TlsIdentity
from ringcomm.errors import RingcommError
from ringcomm.machine.threads import start_thread

__all__ = ["PortGate", "open_gate"]

log = logging.getLogger("ringcomm")


def open_gate(
    reach: Reach, purpose: str, secret: bytes, keepalive: float | None, rank: int, needed: int = 0
) -> "TcpGate | PortGate":
    """Return a gate at which other hosts reach a server of this process, which is `rank`, by this secret.

    `needed`: the number of ranks on this host, if it is known.
    """
    if reach.ports:
        return PortGate(reach, reach.ports, purpose, secret, keepalive, rank, needed)
    return TcpGate(listen_at(reach, purpose), [secret], keepalive, reach.tls)


class PortGate(TcpPeers):
    """Admits peers that have proved the secret of a server at the ports of this process."""

    def __init__(
        self, reach: Reach, ports: range, purpose: str, secret: bytes, keepalive: float | None, rank: int, needed: int
    ) -> None:
        inbox = _Inbox(secret)
        super().__init__(keepalive, inbox)
        with ExitStack() as failed:
            failed.callback(inbox.close)
            for host in reach.bound:
                _attach(inbox, _Where(host, ports, reach.mapped, reach.tls), purpose, rank, needed)
            failed.pop_all()
        self.addresses = [port.address for port in inbox.attached]


class _Inbox:
    """What a server on shared ports listens at: the peers that these hand over.

    Attributes:
        attached: The ports; none once it is closed. They hold it weakly: a gate that nobody closes is closed with it.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.attached: list[_SharedPort] = []
        self._arrived: deque[MessageSocket] = deque()
        self._failure: RingcommError | None = None
        self._bell, self._closed = _Bell(), False

    def put(self, arrived: MessageSocket) -> None:
        """Hand over a peer."""
        self._arrived.append(arrived)
        self._bell.ring()
        if self._closed:
            self._drop()

    def fail(self, failure: RingcommError | None) -> None:
        """Say why no peer can be accepted, in the place of what was said before; None: one has been accepted."""
        self._failure = failure
        if failure:
            self._bell.ring()

    def accept(self) -> tuple[MessageSocket, None]:
        self._bell.hear()
        failure, self._failure = self._failure, None
        if failure:
            raise failure
        if not self._arrived:  # it has rung for a failure that is told or over
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._arrived.popleft(), None

    def fileno(self) -> int:
        return self._bell.fd

    def close(self) -> None:
        self._closed = True
        while self.attached:
            self.attached.pop().detach(self)
        self._drop()

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        with suppress(IndexError):
            while True:
                self._arrived.popleft().close()


class _Where(NamedTuple):
    host: str
    ports: range
    any_address: bool
    tls: TlsIdentity | None  # servers with another one need another port: a peer is greeted before it proves a secret


class _SharedPort:
    """A port at one address of this host, and the thread that accepts peers there.

    The thread closes it when nobody wants peers any more. Who comes then sees that, or is seen: both write first.
    """

    def __init__(self, where: _Where, purpose: str, rank: int, needed: int) -> None:
        listener = listen(where.host, where.ports, purpose, any_address=where.any_address, needed=needed)
        self.address = name_of(listener)
        self._inboxes: dict[bytes, ref[_Inbox]] = {}  # by secret
        self._closed = False  # and the thread ends
        self._failed = False  # to accept the last peer
        self._where, self.tls, self._bell = where, where.tls, _Bell()
        self._server = PeerServer(_Entrance(self, listener), lambda _: None, rank)
        self._server.call_on(self._bell.fd, self._bell.hear)

    @property
    def secrets(self) -> Collection[bytes]:
        return self._inboxes.keys()

    def start(self) -> None:
        try:
            self._thread = start_thread("ringcomm-port", self._run)
        except RingcommError:
            self._server.close()
            raise

    def join(self) -> None:
        """Wait until nothing listens here any more."""
        self._bell.ring()
        self._thread.join(HANDSHAKE_TIMEOUT)

    def attach(self, inbox: _Inbox) -> bool:
        """Return whether peers are handed over to it from now on: not if the port is closed."""
        self._inboxes[inbox.secret] = ref(inbox)
        if self._closed:
            del self._inboxes[inbox.secret]
            return False
        inbox.attached.append(self)
        return True

    def detach(self, inbox: _Inbox) -> None:
        self._inboxes.pop(inbox.secret, None)
        self._bell.ring()

    def hand_over(self, peer: MessageSocket, secret: bytes) -> None:
        self._server.release(peer)
        held = self._inboxes.get(secret)
        if held and (inbox := held()):
            inbox.put(peer)
        else:  # it has closed meanwhile
            peer.close()

    def accepted(self) -> None:
        if self._failed:
            self._tell(None)

    def _tell(self, failure: RingcommError | None) -> None:
        self._failed = failure is not None
        for held in [*self._inboxes.values()]:
            if inbox := held():
                inbox.fail(failure)

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._server.serve(None)
                except RingcommError as error:  # no descriptor is left
                    self._tell(error)
                self._closed = not self._inboxes
                self._closed = self._closed and not self._inboxes
        except Exception as error:  # whatever it is: nobody else accepts peers here
            text = f"nobody accepts connections at {self.address} any more: {error}"
            log.error("%s", text)
            self._closed = True
            self._tell(RingcommError(text))
        finally:
            self._server.close()
            _ports.pop(self._where, None)


_opening = threading.Lock()
_ports: dict[_Where, _SharedPort] = {}


def _attach(inbox: _Inbox, where: _Where, purpose: str, rank: int, needed: int) -> None:
    """Have the peers that reach this process there handed over to the inbox."""
    with _opening:
        if port := _ports.get(where):
            if port.attach(inbox):
                return
            port.join()
        port = _SharedPort(where, purpose, rank, needed)
        port.attach(inbox)
        port.start()
        _ports[where] = port


class _Entrance(TcpGate):
    """Hands a peer over as soon as it has proved a secret."""

    def __init__(self, port: _SharedPort, listener: socket.socket) -> None:
        super().__init__([listener], port.secrets, None, port.tls)
        self._port = port

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        self._port.accepted()
        return super().greet(peer)

    def proved(self, peer: MessageSocket, secret: bytes) -> None:
        self._port.hand_over(peer, secret)


class _Bell:
    """Wakes a thread that waits for a descriptor, once for each ring. It lives as long as anybody may ring."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def hear(self) -> None:
        """Raise BlockingIOError if nobody has rung."""
        os.eventfd_read(self.fd)

    def __del__(self) -> None:
        with suppress(AttributeError):  # there was no descriptor left
            os.close(self.fd)


def _forget() -> None:
    """A forked child has no threads, and PeerServer has closed its copies of what listens."""
    global _opening
    _opening = threading.Lock()
    _ports.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
