"""The network over sockets: its link, and the thread that connects this rank to others once the link needs them."""

import logging
import os
import socket
import threading
import time
import weakref
from contextlib import ExitStack, closing
from typing import Any

from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.bootstrap.wire.keepalive import patience_with, probe
from ringcomm.config import Config
from ringcomm.errors import RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.network.mesh import Mesh
from ringcomm.transports.network.reconnect import Survivors
from ringcomm.transports.network.transport import Network

__all__ = ["SocketNetwork", "open_link"]

log = logging.getLogger("ringcomm")

SLICE = 1.0  # seconds between two looks at the ranks that have not answered


class SocketNetwork(Network):
    """The link of this process over the connections of a mesh, which it closes.

    `name`: see rc_network_open.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        mesh: Mesh,
        name: str,
        config: Config,
        selector: AlgorithmSelector,
        survivors: Survivors | None,
    ) -> None:
        with ExitStack() as failed:
            failed.callback(mesh.close)
            handle = open_link(rank, size, mesh, name, config.keepalive)
            connector = _Connector(handle, size, mesh, config)
            failed.pop_all()
        super().__init__(handle, selector, "sockets", survivors)
        self._close = weakref.finalize(self, connector.close)

    def leave(self) -> None:
        self._close()


def open_link(rank: int, size: int, mesh: Mesh, name: str, keepalive: float) -> Any:
    """Return an rc_network over the connections that a mesh has."""
    connected = mesh.take()
    slot = ffi.new("rc_network **")
    for fd in connected.values():
        _probe(fd, keepalive)
    sockets = [connected.get(other, -1) for other in range(size)]
    check(lib.rc_network_open(rank, size, sockets, name.encode(), *patience_with(keepalive), slot))
    return ffi.gc(slot[0], lib.rc_network_free)


def _probe(fd: int, keepalive: float) -> None:
    connected = socket.socket(fileno=fd)
    try:
        probe(connected, keepalive)
    finally:
        connected.detach()


class _Connector:
    """Makes the connections that the core asks for, and takes those that other ranks make, on a thread of its own."""

    def __init__(self, handle: Any, size: int, mesh: Mesh, config: Config) -> None:
        self._handle, self._mesh, self._config = handle, mesh, config
        self._since: dict[int, float] = {}  # the ranks to connect to
        self._readable, self._wanted, self._count = ffi.new("int *"), ffi.new("int[]", size), ffi.new("int *")
        self._take_wanted()
        mesh.server.call_on(self._readable[0], self._take_wanted)
        self._closing, self._process = False, os.getpid()
        self._thread = start_thread("ringcomm-mesh", self._run)

    def close(self) -> None:
        """End the thread, and with it the mesh, once what was sent has left this host."""
        if os.getpid() != self._process:  # a forked child has no such thread
            return
        check(lib.rc_network_flush(self._handle))
        self._closing = True
        os.eventfd_write(self._readable[0], 1)
        if threading.current_thread() is not self._thread:  # which may have collected garbage
            self._thread.join()

    def _run(self) -> None:
        with closing(self._mesh):
            while not self._closing:
                try:
                    self._mesh.serve(SLICE if self._since else None)
                except RingcommError as error:  # no descriptor is left
                    log.warning("%s", error)
                self._give_connected()
                self._give_up()

    def _take_wanted(self) -> None:
        check(lib.rc_network_wanted(self._handle, self._readable, self._wanted, self._count))
        for rank in self._wanted[0 : self._count[0]]:
            self._since[rank] = time.monotonic()
            self._mesh.connect_to(rank)

    def _give_connected(self) -> None:
        for rank, fd in self._mesh.take().items():
            self._since.pop(rank, None)
            _probe(fd, self._config.keepalive)
            check(lib.rc_network_connect(self._handle, rank, fd, NULL))

    def _give_up(self) -> None:
        """Give the ranks up that listen no more, whose host does not answer, or that take too long themselves."""
        for rank, since in [*self._since.items()]:
            refuses = isinstance(self._mesh.failures.get(rank), ConnectionRefusedError)
            limit = self._config.start_limit if self._mesh.reaches(rank) else patience_with(self._config.keepalive).idle
            if refuses or time.monotonic() - since >= limit:
                del self._since[rank]
                self._mesh.give_up(rank)
                reason = f"no connection {self._mesh.reason(rank)}"
                check(lib.rc_network_connect(self._handle, rank, -1, reason.encode()))
