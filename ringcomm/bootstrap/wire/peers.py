"""The serving side of a startup socket: it accepts peers, hears what they send, and refuses some."""

import errno
import logging
import math
import re
import selectors
import socket
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import Any, Protocol, Self

from ringcomm.bootstrap.wire.framing import MessageSocket, close_in_children
from ringcomm.errors import RingcommError
from ringcomm.machine import descriptors

__all__ = ["WAITING", "Gate", "Listener", "PeerServer"]

log = logging.getLogger("ringcomm")

INTERVAL = 1.0  # seconds between two lines for the same kind of refusal, and until what was exhausted is tried again
WAITING = 4096  # peers that the kernel keeps until they are accepted; net.core.somaxconn is as much by default
ACCEPTED_AT_ONCE = 128  # peers, before those that have come already are heard


class Listener(Protocol):
    """What peers are accepted from: a socket that listens, or what another thread has accepted."""

    def fileno(self) -> int: ...

    def accept(self) -> tuple[socket.socket, Any]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Gate:
    """Where a server listens, and whom it admits: unix.UnixGate, tcp.TcpGate, shared_port.PortGate."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def greet(self, peer: socket.socket) -> tuple[MessageSocket | None, str]:
        """Return the socket by which to hear a new peer, if it is still there, and why it is refused, or ""."""
        return MessageSocket(peer), ""

    def admits(self, peer: MessageSocket) -> tuple[bool, str]:  # noqa: ARG002 (a gate that admits all)
        """Return whether the message of a peer is for the server, and why the peer is refused, or ""."""
        return True, ""

    def room(self) -> int:
        """Return how many more peers may come now; if none, `due` is when that may change."""
        return ACCEPTED_AT_ONCE

    def due(self) -> float:
        """Return when to call `poll` next."""
        return math.inf

    def poll(self, peers: Collection[MessageSocket]) -> tuple[MessageSocket, str] | None:  # noqa: ARG002 (a gate that admits all)
        """Do what is due; return a peer to refuse, and why."""
        return None

    def forget(self, peer: MessageSocket) -> None:
        """Note that a peer is gone."""

    def describe(self, peer: MessageSocket) -> str:
        try:
            return "{} port {}".format(*peer.getpeername())
        except OSError:
            return "a connection"


class PeerServer:
    """Accepts peers at a gate. `receive(peer)` is called when an admitted one has sent something or disconnected.

    Any process may connect: the gate refuses those that it does not trust, the caller any other by its first message,
    with `refuse`; both are logged. The sockets of peers do not block.

    `serve` raises RingcommError when this process, which is `rank` or no rank, has no descriptor, or the system no
    memory, left for a peer. The next one is accepted when another is gone, or after a second.
    """

    def __init__(self, gate: Gate, receive: Callable[[Any], object], rank: int | None) -> None:
        self._gate, self._receive, self._rank = gate, receive, rank
        self._refusals = RefusalLog()
        self._accepts_again = 0.0
        for listener in gate.listeners:
            close_in_children(listener)
        self._peers: set[MessageSocket] = set()
        self._open = ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        for listener in gate.listeners:
            self._open.enter_context(listener)

    def add(self, peer: MessageSocket) -> None:
        peer.setblocking(False)
        close_in_children(peer)
        self._peers.add(peer)
        self._selector.register(peer, selectors.EVENT_READ)

    def call_on(self, source: socket.socket | int, action: Callable[[], object]) -> None:
        """Call `action` when this socket, or descriptor, which is no peer's, is readable."""
        self._selector.register(source, selectors.EVENT_READ, action)

    def send(self, peer: MessageSocket, message: bytes) -> None:
        """Send a message; what the kernel has no room for follows once the peer has read more."""
        if peer in self._peers:
            with suppress(OSError):  # it has disconnected; the next read reports that
                peer.send(message)
            self._flush(peer)

    def serve(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds for peers, handle what they have sent, and return whether any was ready."""
        waits = self._accepts_again > time.monotonic()
        self._listen(not waits and self._gate.room() > 0)
        due = min(self._gate.due() if self._peers else math.inf, self._refusals.due)
        if waits:
            due = min(due, self._accepts_again)
        if due < math.inf:
            left = max(0.0, due - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        ready = self._selector.select(timeout)
        for key, events in ready:
            peer = key.fileobj
            if key.data:
                key.data()
            elif peer in self._gate.listeners:
                for _ in range(min(ACCEPTED_AT_ONCE, self._gate.room())):
                    if not self._accept(peer):
                        break
            elif peer in self._peers:  # not dropped meanwhile
                assert isinstance(peer, MessageSocket)
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ:
                    self._hear(peer)
                    while peer in self._peers and peer.holds_received():
                        self._hear(peer)
        while refused := self._gate.poll(self._peers):
            self.refuse(*refused)
        self._refusals.flush(time.monotonic())
        return bool(ready)

    def refuse(self, peer: MessageSocket, reason: str) -> None:
        self._refusals.add(self._gate.describe(peer), reason)
        self.drop(peer)

    def drop(self, peer: MessageSocket) -> None:
        self._forget(peer)
        peer.close()
        self._accepts_again = 0.0

    def release(self, peer: MessageSocket) -> MessageSocket:
        """Return a peer; the caller owns it from now on."""
        self._forget(peer)
        return peer

    def close(self) -> None:
        self._refusals.flush()
        for peer in self._peers:
            peer.close()
        self._open.close()

    def _forget(self, peer: MessageSocket) -> None:
        self._gate.forget(peer)
        self._selector.unregister(peer)
        self._peers.remove(peer)

    def _listen(self, wanted: bool) -> None:
        for listener in self._gate.listeners:
            if wanted == (listener in self._selector.get_map()):
                continue
            if wanted:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)

    def _accept(self, listener: Listener) -> bool:
        """Accept a peer, if there is one, and return whether there may be more."""
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EAGAIN, errno.EINTR):
                return False  # none, or it disconnected again
            if error.errno == errno.EMFILE and descriptors.raise_limit():
                return True
            self._accepts_again = time.monotonic() + INTERVAL  # the listener would stay ready
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise descriptors.exhausted(self._rank, "to accept another rank", error) from None
            who = descriptors.name(self._rank)
            raise RingcommError(f"{who} cannot accept another rank: {error.strerror}", rank=self._rank) from None
        heard, reason = self._gate.greet(peer)
        if reason:
            self._refusals.add("a connection", reason)
            peer.close()
        elif heard:
            self.add(heard)
        return True

    def _flush(self, peer: MessageSocket) -> None:
        with suppress(OSError):
            more = 0 if peer.flush() else selectors.EVENT_WRITE
            self._selector.modify(peer, selectors.EVENT_READ | more)

    def _hear(self, peer: MessageSocket) -> None:
        admitted, reason = self._gate.admits(peer)
        if reason:
            self.refuse(peer, reason)
        elif admitted:
            self._receive(peer)


class RefusalLog:
    """Logs the first refusal at once, and those of the next second in one line for each kind of reason.

    A process that tries again and again must not fill a disk. Reasons of a kind differ in numbers only, so the kinds
    are few, and a flood of one does not hide another.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}  # by kind: the last refusal, and their number since the last line
        self.due = math.inf  # when to call `flush`
        self._next = 0.0  # the time from which lines may be logged

    def add(self, peer: str, reason: str) -> None:
        kind = re.sub(r"-?\d+", "", reason)
        _, count = self._held.get(kind, ("", 0))
        self._held[kind] = f"{peer}: {reason}", count + 1
        self.due = self._next
        self.flush(time.monotonic())

    def flush(self, now: float = math.inf) -> None:
        """Log what is due."""
        if now < self.due:
            return
        for last, count in self._held.values():
            others = f" (and {count - 1} other attempts in the last second)" if count > 1 else ""
            log.warning("refused %s%s", last, others)
        self._held, self.due, self._next = {}, math.inf, time.monotonic() + INTERVAL
