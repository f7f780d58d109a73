"""The serving side of a startup socket: it accepts the processes of this user, and hears what they send."""

import errno
import selectors
import socket
from collections.abc import Callable
from contextlib import ExitStack

from ringcomm.bootstrap.refusals import RefusalLog
from ringcomm.bootstrap.sockets import close_in_children, credentials, listen, untrusted_reason
from ringcomm.errors import RingcommError
from ringcomm.machine import descriptors

__all__ = ["PeerServer"]


class PeerServer:
    """Listens at an abstract address, or, as a TcpServer, at one of TCP.

    `receive(peer)` is called when a peer has sent something or disconnected.

    Any process may connect: one of another user is refused and logged here, any other by its first message, with
    `refuse`. A send to a peer takes at most `send_timeout` seconds, and nothing else waits for one.

    `serve` raises RingcommError when this process, which is `rank` or no rank, has no descriptor, or the system no
    memory, left for a peer. The next one is accepted when another is gone.
    """

    def __init__(
        self,
        address: str,
        purpose: str,
        receive: Callable[[socket.socket], object],
        rank: int | None,
        send_timeout: float = 0.0,
    ) -> None:
        self._receive, self._rank, self._send_timeout = receive, rank, send_timeout
        self._refusals = RefusalLog()
        self._listener = self._listen(address, purpose)
        close_in_children(self._listener)
        self._peers: set[socket.socket] = set()
        self._open = ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._selector.register(self._open.enter_context(self._listener), selectors.EVENT_READ)

    def add(self, peer: socket.socket) -> None:
        peer.settimeout(self._send_timeout)
        close_in_children(peer)
        self._peers.add(peer)
        self._selector.register(peer, selectors.EVENT_READ)

    def serve(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds for peers, handle what they have sent, and return whether any was ready."""
        waits = [seconds for seconds in (timeout, self._refusals.due()) if seconds is not None]
        ready = self._selector.select(min(waits, default=None))
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.fileno() >= 0:  # not dropped meanwhile
                    self._receive(key.fileobj)
        self._refusals.poll()
        return bool(ready)

    def refuse(self, peer: socket.socket, reason: str) -> None:
        self._refusals.add(self.describe(peer), reason)
        self.drop(peer)

    def drop(self, peer: socket.socket) -> None:
        self._forget(peer)
        peer.close()
        if self._listener not in self._selector.get_map():  # see _accept
            self._selector.register(self._listener, selectors.EVENT_READ)

    def release(self, peer: socket.socket) -> int:
        """Return the descriptor of a peer; the caller owns it from now on."""
        self._forget(peer)
        return peer.detach()

    def describe(self, peer: socket.socket) -> str:
        return f"process {credentials(peer)[0]}"

    def close(self) -> None:
        self._refusals.flush()
        for peer in self._peers:
            peer.close()
        self._open.close()

    def _listen(self, address: str, purpose: str) -> socket.socket:
        return listen(address, purpose)

    def _forget(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        self._peers.remove(peer)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EAGAIN, errno.EINTR):
                return  # it disconnected again
            self._selector.unregister(self._listener)  # it would stay ready
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise descriptors.exhausted(self._rank, "to accept another rank", error) from None
            who = descriptors.name(self._rank)
            raise RingcommError(f"{who} cannot accept another rank: {error.strerror}", rank=self._rank) from None
        self._admit(peer)

    def _admit(self, peer: socket.socket) -> None:
        if reason := untrusted_reason(peer):
            self._refusals.add("a connection", reason)
            peer.close()
        else:
            self.add(peer)
