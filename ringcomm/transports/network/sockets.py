"""The network over sockets: a mesh that connects neighbors at the start, its link, and the thread that connects this
rank to others once the link needs them.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ringcomm.algorithms.select import AlgorithmSelector
from ringcomm.bootstrap.start_errors import FIREWALL, missing_connections
from ringcomm.bootstrap.store import Store, all_gather_facts
from ringcomm.bootstrap.wire.addresses import Reach
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE
from ringcomm.bootstrap.wire.keepalive import patience_with
from ringcomm.bootstrap.wire.tls import take_over
from ringcomm.errors import RingcommError
from ringcomm.machine import descriptors
from ringcomm.machine.threads import start_thread
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.network.host_layout import HostLayout
from ringcomm.transports.network.mesh import Mesh
from ringcomm.transports.network.search import LEFT, RUNS, SLICE
from ringcomm.transports.network.survivors import Survivors
from ringcomm.transports.network.transport import Network

__all__ = ["SocketNetwork", "connect_mesh", "open_link"]

log = logging.getLogger("ringcomm")

ADDRESSES = "mesh"  # in the store
HOW_BYTES = MESSAGE_OF_HANDSHAKE  # of a text that says how a rank has died: an answer in a mesh


def connect_mesh(
    layout: HostLayout, store: Store, reach: Reach, secret: bytes, keepalive: float, timeout: float
) -> Mesh:
    """Return a mesh in which this rank is connected to its neighbors.

    `reach`, which may differ per rank: flows use all addresses, other connections the first. All ranks know the
    `secret`. `keepalive`: see Config.

    Raises CollectiveTimeout naming the neighbors that have not connected within `timeout` seconds, and what another
    rank has told the store.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as failed:
        mesh = Mesh(layout, store.members, reach, secret, keepalive)
        failed.callback(mesh.close)
        rank, size, neighbors = mesh.rank, mesh.size, layout.neighbors()
        descriptors.provide_connections(mesh.number, len(neighbors))
        of_all = all_gather_facts(
            store, ADDRESSES, rank, size, ",".join(mesh.own), timeout, meanwhile=lambda: mesh.serve(0)
        )
        mesh.know(of_all)
        for peer in neighbors:
            if peer < rank:
                mesh.connect_to(peer)
        while missing := [peer for peer in neighbors if peer not in mesh.connected]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise missing_connections(missing, rank, size, timeout, store.members, _reasons(mesh, missing))
            store.check()
            mesh.serve(min(SLICE, left))
        failed.pop_all()
    return mesh


def _reasons(mesh: Mesh, missing: Sequence[int]) -> str:
    """Say why these ranks are not connected, as far as this one knows: the lower rank of two listens."""
    lines = [f"rank {mesh.number_of(each)} {mesh.reason(each)}" for each in missing if each < mesh.rank]
    if any(each > mesh.rank for each in missing):
        lines.append(f"rank {mesh.number} listens at {', '.join(mesh.own)}")
    return "".join(f"\n{line}" for line in [*lines, f"{FIREWALL} (RINGCOMM_PORT_RANGE keeps ports in a range)"])


class SocketNetwork(Network):
    """The link of this process over the connections of a mesh, which it closes.

    `name`: see rc_network_open.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        keepalive: float,
        flows: int,
        selector: AlgorithmSelector,
        survivors: Survivors | None,
    ) -> None:
        with ExitStack() as failed:
            failed.callback(mesh.close)
            handle = open_link(mesh, name, keepalive)
            connector = _Connector(handle, mesh)
            failed.pop_all()
        super().__init__(handle, selector, "sockets", survivors)
        self._close = weakref.finalize(self, connector.close)
        self._most_addresses = max(map(len, mesh.addresses))
        self.use_flows(flows)

    def use_flows(self, per_address: int) -> bool:
        number = per_address * self._most_addresses
        check(lib.rc_network_want_flows(self.handle, number if number > 1 else 0))  # one carries no more than none
        return True

    def leave(self) -> None:
        self._close()


def open_link(mesh: Mesh, name: str, keepalive: float) -> Any:
    """Return an rc_network over the connections that a mesh has."""
    slot = ffi.new("rc_network **")
    check(lib.rc_network_open(mesh.rank, mesh.size, name.encode(), *patience_with(keepalive), slot))
    handle = ffi.gc(slot[0], lib.rc_network_free)
    give_connections(mesh, handle)
    return handle


def give_connections(mesh: Mesh, handle: Any) -> None:
    """Give the new connections of a mesh to its rc_network."""
    for rank, peer in mesh.take().items():
        check(lib.rc_network_connect(handle, rank, *take_over(peer), NULL))


class _Connector:
    """Makes the connections that the core asks for, and takes those that other ranks make, on a thread of its own."""

    def __init__(self, handle: Any, mesh: Mesh) -> None:
        self._handle, self._mesh = handle, mesh
        self._readable, self._count = ffi.new("int *"), ffi.new("int *")
        self._wanted, self._flows = ffi.new("int[]", mesh.size), ffi.new("int[]", mesh.size)
        self._ended, self._how = ffi.new("int *"), ffi.new("char[]", HOW_BYTES)
        self._left = ffi.new("int *")
        mesh.find_ended(self._state_of)
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
        try:
            while not self._closing:
                self._mesh.serve()
                self._report()
        except Exception as error:  # whatever it is: nobody else can make connections
            log.error("rank %d cannot connect to other ranks any more: %s", self._mesh.number, error)
            check(lib.rc_network_fail(self._handle, f"cannot connect to other ranks any more: {error}".encode()))
        finally:
            self._mesh.close()
            for rank in range(self._mesh.size):  # what waits for a connection
                check(lib.rc_network_connect(self._handle, rank, -1, NULL, b"no connection is made any more"))

    def _take_wanted(self) -> None:
        check(lib.rc_network_wanted(self._handle, self._readable, self._wanted, self._flows, self._count))
        for rank, flow in zip(self._wanted[0 : self._count[0]], self._flows, strict=False):
            if flow:
                self._mesh.add_flow(rank, flow)
            else:
                self._mesh.connect_to(rank)
        self._log_ended_flows()

    def _log_ended_flows(self) -> None:
        while True:
            check(lib.rc_network_ended_flow(self._handle, self._ended, self._left, self._how, HOW_BYTES))
            if self._ended[0] < 0:
                return
            how, other = ffi.string(self._how).decode(), self._mesh.number_of(self._ended[0])
            text = "rank %d: a flow to rank %d has ended (%s); %d are left for its large data"
            log.warning(text, self._mesh.number, other, how, self._left[0])

    def _report(self) -> None:
        """Tell the core which ranks are connected, and of which others it is known that they never will be."""
        give_connections(self._mesh, self._handle)
        while self._mesh.flows:
            rank, peer = self._mesh.flows.pop()
            try:
                check(lib.rc_network_add_flow(self._handle, rank, *take_over(peer)))
            except RingcommError as error:  # the system has no room
                log.warning("rank %d: a flow to rank %d: %s", self._mesh.number, self._mesh.number_of(rank), error)
        while self._mesh.ended:
            rank, how = self._mesh.ended.popitem()
            check(lib.rc_network_connect(self._handle, rank, -1, NULL, NULL if how == LEFT else how))

    def _state_of(self, rank: int) -> bytes:
        """Say what has become of another rank of this host."""
        check(lib.rc_network_ended(self._handle, rank, self._ended, self._how, HOW_BYTES))
        if not self._ended[0]:
            return RUNS
        return bytes(ffi.string(self._how)) or LEFT
