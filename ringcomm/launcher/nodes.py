"""What the launchers of a job on several hosts learn from each other: who has arrived, failed first, and ended.

Each launcher, one per node, is a member of a store that the one of node 0 serves. At first they share what places their
ranks get. From then on each waits for a key that node 0 sets when the ranks of all nodes have ended. A failure, also a
lost connection, aborts the store: all learn of the same one, that which reached node 0 first. Node 0 also sends
them the ranks that `shrink` has left out, and that a rank has waited too long for `grow`.
"""

import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

from ringcomm.bootstrap.arrivals import arrival_timeout, format_ranks
from ringcomm.bootstrap.keepalive import probe_now
from ringcomm.bootstrap.place import MAX_SIZE, Place
from ringcomm.bootstrap.servedstore import ServedStore
from ringcomm.bootstrap.tcpstore import NODES, JobEvent, TcpStore, TcpStoreServer, broken
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError, refuse
from ringcomm.machine import descriptors
from ringcomm.transports.shm import check_versions
from ringcomm.version import VERSION

__all__ = ["MAX_NODES", "NodeOptions", "Nodes", "join_nodes"]

log = logging.getLogger("ringcomm")

MAX_NODES = 1024
REPORT_TIMEOUT = 2.0  # seconds for node 0 to name the missing nodes after another node has timed out
WARN_AFTER = 10.0  # seconds before a launcher says for which nodes it waits
STARTED, ALL_ENDED = "the ranks have connected", "all nodes have ended"
GROW_TIMED_OUT = "a rank has waited too long for grow"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Which node of which job this is."""

    rank: int
    count: int
    address: str  # of the store: address:port
    secret: str
    timeout: float  # seconds for all nodes to come
    keepalive: float  # seconds after which a node that does not answer is lost
    elastic: bool = False  # continues without nodes that are lost once the ranks have connected

    @property
    def name(self) -> str:
        return f"node {self.rank} ({_host()})"


class _Launchers(ServedStore):
    """The store of the launchers."""

    member = "node"

    def __init__(self, size: int, elastic: bool) -> None:
        super().__init__(size)
        self._elastic = elastic

    def join(self, peer: socket.socket, rank: int, size: int, process: str) -> str:
        refusal = super().join(peer, rank, size, process)
        if peer in self.members:
            log.info("node %d (%s) has come", rank, process)
        return refusal

    def handle(self, peer: socket.socket, message: bytes) -> None:
        super().handle(peer, message)
        if message == f"set\0{GROW_TIMED_OUT}\0".encode():
            self.push(JobEvent(grow_timed_out=True).encode())

    def lose(self, peer: socket.socket, error: OSError | None) -> None:
        if (node := self.members.get(peer)) is not None:
            text = f"node {node} ({self.processes[node]}) is lost: its launcher {broken(error)}"
            if self._elastic and STARTED in self._values:
                log.warning("%s; the others continue without it", text)
                self._values[ended(node)] = b""
            else:
                self.fail(PeerLost(text))
        self.leave(peer)


class _NodeStore(TcpStore):
    """The connection of a launcher; on node 0 the server as well."""

    _server_name = "node 0"
    _member = "node"
    _warn_after = WARN_AFTER

    def _connect(self, timeout: float) -> socket.socket:
        if self._place.rank > 0:
            return super()._connect(timeout)
        try:
            self._server = TcpStoreServer(
                self._place, self._keepalive, _Launchers(self._place.size, self._elastic), self._process()
            )
        except ArgumentError as error:
            cure = "node 0 listens there, the others have --node-rank 1, 2, …, and --master-port is free"
            raise ArgumentError(f"{error}: {cure}") from None
        return self._server.client

    def __init__(self, place: Place, options: NodeOptions) -> None:
        self._elastic = options.elastic
        super().__init__(place, options.timeout, options.keepalive)

    def ask(self, key: str) -> None:
        """Ask for a key; `fileno` is then readable when `answer` has the answer or raises the failure of the job."""
        self._socket.setblocking(False)
        self._ask(key, math.inf)

    def fileno(self) -> int:
        return self._socket.fileno()

    def probe(self) -> float:
        return probe_now(self._socket)

    def answer(self) -> bytes:
        return self._answer("", math.inf)

    def _process(self) -> str:
        return _host()

    def _lost(self, error: OSError | None) -> PeerLost:
        return PeerLost(f"node 0 ({self._place.store}) is lost: its launcher {broken(error)}")

    def _unreachable(self, timeout: float, reason: str) -> CollectiveTimeout:
        absent = arrival_timeout([0], self._place.size, timeout, "node")
        return CollectiveTimeout(f"{absent}; {self._place.store}: {reason}")


class Nodes:
    """The launchers of a job, as one of them knows them: the place of its first rank, and what ends all ranks."""

    def __init__(self, store: _NodeStore, options: NodeOptions, first: Place) -> None:
        self.host, self.name, self.first = _host(), options.name, first
        self.over = False  # a failure was read, or all nodes have ended
        self.due = 0.0 if options.rank else math.inf  # when to call `probe` next
        self._started = False
        self._store, self._options = store, options
        each = [ended(node) for node in range(options.count)]
        self._mine = each[options.rank]
        self._awaited = each if options.rank == 0 else [ALL_ENDED]
        store.ask(self._awaited[0])

    def fileno(self) -> int:
        return self._store.fileno()

    def probe(self) -> None:
        """Notice whether node 0 does not answer; called while this launcher waits."""
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + self._store.probe()

    def fail(self, error: RingcommError) -> None:
        """End the job on all nodes: `read` returns this error on each, or the one that came first."""
        if not self.over:
            self._store.abort(error)

    def start(self) -> None:
        """Tell node 0 that the ranks have connected."""
        if not (self._started or self.over):
            self._started = True
            with suppress(PeerLost):  # node 0 is lost, as `read` will say
                self._store.set(STARTED, b"")

    def end_stopped(self) -> None:
        """Tell the launchers of all nodes that a rank has waited too long for `grow`."""
        if not self.over:
            with suppress(PeerLost):  # node 0 is lost, as `read` will say
                self._store.set(GROW_TIMED_OUT, b"")

    def end(self) -> None:
        """Tell the other nodes that the ranks of this one have ended."""
        if not self.over:
            with suppress(PeerLost):  # node 0 is lost, as `read` will say
                self._store.set(self._mine, b"")

    def read(self) -> RingcommError | JobEvent:
        """Read what has come; return the failure of the job, or else what node 0 tells."""
        try:
            if pushed := self._store.answer():  # the keys that this launcher awaits have no value
                return JobEvent.decode(pushed)
            del self._awaited[0]
            if self._awaited:
                self._store.ask(self._awaited[0])
                return JobEvent()
            if self._options.rank == 0:
                self._store.set(ALL_ENDED, b"")
        except BlockingIOError:  # half a message
            return JobEvent()
        except RingcommError as error:
            self._leave()
            return error
        self._leave()
        return JobEvent()

    def _leave(self) -> None:
        self.over, self.due = True, math.inf
        if self._options.rank > 0:  # node 0 serves the others until it exits
            self._store.close()


@contextmanager
def join_nodes(options: NodeOptions, ranks: int) -> Iterator[Nodes]:
    """Join the launchers of the other nodes, on which the job fails if the body raises here.

    Raises the same error on all nodes that have come if some do not come in time, which it names, or do not fit.
    """
    place = Place(options.rank, options.count, NODES, options.secret, "ringcomm run", hosts=True, store=options.address)
    with _NodeStore(place, options) as store:
        try:
            try:
                nodes = Nodes(store, options, _find_first_place(store, options, ranks))
            except RingcommError as error:
                store.abort(error)
                raise
            yield nodes
        except BaseException as error:  # the first to abort wins
            store.abort(Aborted(f"{options.name}: {str(error) or type(error).__name__}"))
            raise


def ended(node: int) -> str:
    """Return the key that is set once the ranks of a node have ended."""
    return f"node {node} has ended"


def _find_first_place(store: _NodeStore, options: NodeOptions, ranks: int) -> Place:
    """Return the place of the first rank of this node. Node 0 collects what all have and answers each."""
    deadline = time.monotonic() + options.timeout
    mine = {"host": _host(), "version": VERSION, "ranks": ranks, "elastic": options.elastic}
    store.set(f"node {options.rank} is", json.dumps(mine).encode())
    if options.rank == 0:
        nodes = [json.loads(_get(store, f"node {node} is", deadline, options)) for node in range(options.count)]
        check_versions([node["version"] for node in nodes], "node")
        without = [number for number, node in enumerate(nodes) if not node["elastic"]]
        if 0 < len(without) < len(nodes):
            raise refuse("--respawn", "it on all nodes or on none", f"it, but not on {format_ranks(without, 'node')}")
        starts = [0, *accumulate(node["ranks"] for node in nodes)]
        size, job = starts[-1], secrets.token_hex(16)
        if size > MAX_SIZE:
            raise refuse("number of ranks", f"at most {MAX_SIZE} on all nodes", size)
        descriptors.provide(0, size)
        for node, (first, facts) in enumerate(zip(starts, nodes, strict=False)):
            log.info("node %d (%s) has %s", node, facts["host"], format_ranks(range(first, starts[node + 1])))
            store.set(f"place of node {node}", json.dumps([first, size, job]).encode())
    first, size, job = json.loads(_get(store, f"place of node {options.rank}", deadline + REPORT_TIMEOUT, options))
    return Place(first, size, job, options.secret, store=options.address)


def _get(store: _NodeStore, key: str, deadline: float, options: NodeOptions) -> bytes:
    if deadline - time.monotonic() > WARN_AFTER:
        try:
            return store.get(key, WARN_AFTER)
        except CollectiveTimeout as error:
            if error.got:
                text = "%s of %d did not come within %g s; waiting up to %g s (--start-timeout)"
                log.warning(text, format_ranks(error.got, "node"), options.count, WARN_AFTER, options.timeout)
    try:
        return store.get(key, max(0.0, deadline - time.monotonic()))
    except CollectiveTimeout as error:
        if error.got:
            raise arrival_timeout(error.got, options.count, options.timeout, "node") from None
        raise


def _host() -> str:
    return os.uname().nodename
