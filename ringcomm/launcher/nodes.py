"""What the launchers of a job on several hosts learn from each other: who has arrived, failed first, and ended.

Each launcher, one per node, is a member of a store that the one of node 0 serves. First they gather how many ranks each
has, and at last that these have ended. A failure, also a lost connection, aborts the store: all learn of the same one,
that which reached node 0 first.
"""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.member_store import MemberStore
from ringcomm.bootstrap.place import MAX_SIZE, Place
from ringcomm.bootstrap.server import Server, serving
from ringcomm.bootstrap.session import ALL, NODES, Contribution, Peer, Refused, Replies, Start
from ringcomm.bootstrap.start_errors import format_ranks, missing_ranks
from ringcomm.bootstrap.store import LATE
from ringcomm.bootstrap.wire.addresses import listen, split_address
from ringcomm.bootstrap.wire.framing import Frame
from ringcomm.bootstrap.wire.tcp import TcpGate
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError, refuse
from ringcomm.machine import descriptors
from ringcomm.transports.shm import check_versions
from ringcomm.version import VERSION

__all__ = ["MAX_NODES", "NodeOptions", "Nodes", "join_nodes"]

log = logging.getLogger("ringcomm")

MAX_NODES = 1024
WARN_AFTER = 10.0  # seconds before a launcher says for which nodes it waits
PLACES, ENDED = "places", "ended"  # what is gathered


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Which node of which job this is."""

    rank: int
    count: int
    address: str  # of the store: address:port
    secret: str
    timeout: float  # seconds for all nodes to come
    keepalive: float  # seconds after which a node that does not answer is lost
    tls: str | None  # see Config
    elastic: bool = False  # continues without nodes that are lost once the ranks have connected
    bound: str = ""  # the address at which node 0 listens, if that is another one

    @property
    def name(self) -> str:
        return f"node {self.rank} ({_host()})"

    def place(self, rank: int, size: int, job: str) -> Place:
        return Place(rank, size, job, self.secret, hosts=True, tls=self.tls, store=self.address)


class _Launchers(Start):
    """The launchers of a job. The loss of one, and one that does not fit, end it on all nodes."""

    noun = "node"

    def __init__(self, options: NodeOptions, membership: MemberStore) -> None:
        super().__init__(options.count)
        self._elastic, self._membership = options.elastic, membership

    def join(self, peer: Peer, hello: Frame) -> Replies:
        try:
            replies = super().join(peer, hello)
        except Refused as refused:
            self.fail(ArgumentError(f"{hello.fields['process']}: {refused}"))
            raise
        if (node := int(hello.fields["rank"])) > 0:
            log.info("node %d (%s) has come", node, hello.fields["process"])
        return replies

    def lose(self, peer: Peer, how: str) -> Replies:
        lost = self.present.get(peer)
        self.leave(peer)
        if lost is None:
            return []
        text = f"the launcher of node {lost.rank} ({lost.process}) {how}"
        if self._elastic and self._membership.connected:
            log.warning("%s; the others continue without it", text)
            return self.all_gather(peer, Contribution(ENDED, lost.rank, self.size, b"null"))
        self.fail(PeerLost(text))
        return []


def _serve(options: NodeOptions) -> Server:
    """Serve the sessions of the job, in the launcher of node 0."""
    tls = find_identity(options.tls)
    try:
        host, port = split_address(options.address)
        bound = options.bound or host
        purpose = "--master-addr" if bound == host else "RINGCOMM_BIND_ADDRESS"
        listener = listen(bound, [port], purpose, any_address=bound != host)
    except ArgumentError as error:
        hint = "node 0 listens there, the others have --node-rank 1, 2, …, and --master-port is free"
        raise ArgumentError(f"{error}: {hint}") from None
    gate = TcpGate([listener], [os.fsencode(options.secret)], options.keepalive, tls)
    membership = MemberStore()
    return Server(gate, None, main=(NODES, _Launchers(options, membership)), membership=membership)


class Nodes:
    """The launchers of a job, as one of them knows them: the place of its first rank, and what ends all ranks."""

    def __init__(self, store: Client, options: NodeOptions, first: Place) -> None:
        self.host, self.name, self.first, self.keepalive = _host(), options.name, first, options.keepalive
        self.over = False  # a failure was read, or all nodes have ended
        self.due = 0.0 if options.rank else math.inf  # when to call `probe` next
        self._store, self._options = store, options
        self._question = store.put("get", key=ENDED, wait=True)

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
                fields = {"rank": self._options.rank, "size": self._options.count, "reads": ALL}
                self._question = self._store.put("all_gather", b"null", key=ENDED, **fields)

    def read(self) -> RingcommError | None:
        """Read what has come; return the failure of the job, if it has failed."""
        try:
            if self._store.receive(self._question, 0.0):
                self._leave()
        except RingcommError as error:
            self._leave()
            return error
        return None

    def _leave(self) -> None:
        self.over, self.due = True, math.inf
        if self._options.rank > 0:  # node 0 serves the others until it exits
            self._store.close()


@contextmanager
def join_nodes(options: NodeOptions, ranks: int) -> Iterator[Nodes]:
    """Join the launchers of the other nodes, on which the job fails if the body raises here.

    Raises the same error on all nodes that have come if some do not come in time, which it names, or do not fit.
    """
    place = replace(options.place(options.rank, options.count, NODES), launcher="ringcomm run")
    with ExitStack() as stack:
        if options.rank == 0:
            stack.enter_context(serving(_serve(options), min(options.timeout, LATE)))
        node_0 = find_endpoint(place, options.keepalive)
        late = partial(_warn, options)
        client = Client(node_0, NODES, place, options.timeout, process=_host(), late=late, late_after=WARN_AFTER)
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
    """Return the place of the first rank of this node, once all nodes have said how many ranks they have."""
    mine = {"host": _host(), "version": VERSION, "ranks": ranks, "elastic": options.elastic}
    mine["job"] = secrets.token_hex(16)  # that of node 0 counts
    given = Contribution(PLACES, options.rank, options.count, json.dumps(mine).encode())
    waited = min(WARN_AFTER, options.timeout)
    gathered = store.all_gather(given, waited)
    if isinstance(gathered, list) and waited < options.timeout:
        _warn(options, missing_ranks(gathered, options.count, waited, "node"))
        gathered = store.all_gather(given, options.timeout - waited)
    if isinstance(gathered, list):
        raise missing_ranks(gathered, options.count, options.timeout, "node")
    nodes = json.loads(gathered)
    check_versions([node["version"] for node in nodes], "node")
    without = [number for number, node in enumerate(nodes) if not node["elastic"]]
    if 0 < len(without) < len(nodes):
        raise refuse("--respawn", "it on all nodes or on none", f"it, but not on {format_ranks(without, 'node')}")
    starts = [0, *accumulate(node["ranks"] for node in nodes)]
    size, job = starts[-1], nodes[0]["job"]
    if size > MAX_SIZE:
        raise refuse("number of ranks", f"at most {MAX_SIZE} on all nodes", size)
    if options.rank == 0:
        descriptors.provide(0, size)
        for node, (first, facts) in enumerate(zip(starts, nodes, strict=False)):
            log.info("node %d (%s) has %s", node, facts["host"], format_ranks(range(first, starts[node + 1])))
    return options.place(starts[options.rank], size, job)


def _warn(options: NodeOptions, late: CollectiveTimeout) -> None:
    log.warning("%s; waiting up to %g s (--start-timeout)", late, options.timeout)


def _host() -> str:
    return os.uname().nodename
