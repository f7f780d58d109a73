"""What the launchers of a job on several hosts learn from each other: who has arrived, failed first, and ended.

Each launcher, one per node, is a member of a store that the one of node 0 serves. At first they share what places their
ranks get. From then on each waits for a key that node 0 sets when the ranks of all nodes have ended. A failure, also a
lost connection, aborts the store: all learn of the same one, that which reached node 0 first.
"""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import MAX_SIZE, Place
from ringcomm.bootstrap.server import Server, serving
from ringcomm.bootstrap.session import NODES, Start, ended_key
from ringcomm.bootstrap.start_errors import format_ranks, missing_ranks
from ringcomm.bootstrap.store import LATE
from ringcomm.bootstrap.wire.tcp import TcpGate
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError, refuse
from ringcomm.machine import descriptors
from ringcomm.transports.shm import check_versions
from ringcomm.version import VERSION

__all__ = ["MAX_NODES", "NodeOptions", "Nodes", "join_nodes"]

log = logging.getLogger("ringcomm")

MAX_NODES = 1024
REPORT_TIMEOUT = 2.0  # seconds for node 0 to name the missing nodes after another node has timed out
WARN_AFTER = 10.0  # seconds before a launcher says for which nodes it waits
ALL_ENDED = "all nodes have ended"


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


def _serve(options: NodeOptions) -> Server:
    """Serve the sessions of the job, in the launcher of node 0."""

    def loss(node: int, host: str, how: str) -> PeerLost | None:
        text = f"the launcher of node {node} ({host}) {how}"
        if options.elastic and server.membership.ever_had("connected"):
            log.warning("%s; the others continue without it", text)
            return None
        return PeerLost(text)

    try:
        gate = TcpGate(options.address, "--master-addr", os.fsencode(options.secret), options.keepalive)
    except ArgumentError as error:
        hint = "node 0 listens there, the others have --node-rank 1, 2, …, and --master-port is free"
        raise ArgumentError(f"{error}: {hint}") from None
    server = Server(gate, None, main=(NODES, Start(options.count, noun="node", loss=loss, strict=True)))
    return server


class Nodes:
    """The launchers of a job, as one of them knows them: the place of its first rank, and what ends all ranks."""

    def __init__(self, store: Client, options: NodeOptions, first: Place) -> None:
        self.host, self.name, self.first, self.keepalive = _host(), options.name, first, options.keepalive
        self.over = False  # a failure was read, or all nodes have ended
        self.due = 0.0 if options.rank else math.inf  # when to call `probe` next
        self._store, self._options = store, options
        each = [ended_key(node) for node in range(options.count)]
        self._mine = each[options.rank]
        self._awaited = each if options.rank == 0 else [ALL_ENDED]
        self._await_next()

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

    def end(self) -> None:
        """Tell the other nodes that the ranks of this one have ended."""
        if not self.over:
            with suppress(PeerLost):  # node 0 is lost, as `read` will say
                self._store.set(self._mine, b"")

    def read(self) -> RingcommError | None:
        """Read what has come; return the failure of the job, if it has failed."""
        try:
            while self._store.receive(self._question, 0.0):
                del self._awaited[0]
                if not self._awaited:
                    if self._options.rank == 0:
                        self._store.set(ALL_ENDED, b"")
                    self._leave()
                    return None
                self._await_next()
        except RingcommError as error:
            self._leave()
            return error
        return None

    def _await_next(self) -> None:
        self._question = self._store.put("get", key=self._awaited[0], timeout=math.inf)

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
    with ExitStack() as stack:
        if options.rank == 0:
            stack.enter_context(serving(_serve(options), min(options.timeout, LATE)))
        node_0 = find_endpoint(place, options.keepalive)
        client = Client(node_0, NODES, place, options.timeout, process=_host(), noun="node", warn_after=WARN_AFTER)
        store = stack.enter_context(client)
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


def _find_first_place(store: Client, options: NodeOptions, ranks: int) -> Place:
    """Return the place of the first rank of this node. Node 0 collects what all have and answers each."""
    deadline = time.monotonic() + options.timeout
    mine = {"host": _host(), "version": VERSION, "ranks": ranks, "elastic": options.elastic}
    store.set(f"node {options.rank} is", json.dumps(mine).encode())
    if options.rank == 0:
        nodes = []
        for node in range(options.count):
            nodes.append(json.loads(_get(store, f"node {node} is", deadline, options)))
            if node > 0:
                log.info("node %d (%s) has come", node, nodes[-1]["host"])
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
    return Place(first, size, job, options.secret, hosts=True, store=options.address)


def _get(store: Client, key: str, deadline: float, options: NodeOptions) -> bytes:
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
            raise missing_ranks(error.got, options.count, options.timeout, "node") from None
        raise


def _host() -> str:
    return os.uname().nodename
