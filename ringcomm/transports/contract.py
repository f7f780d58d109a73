"""The contract of a transport, as types. `ringcomm.testing.check_transport` is the same contract as a test.

A transport moves bytes between the ranks of one group. The communicator checks and shapes the arguments, the transport
does the rest:

- pointers are cdata made by ringcomm.arrays, or `native.NULL`; counts are elements; dtypes and operations have the
  codes of ringcomm.types; timeouts are seconds, negative for the group's own;
- a call returns when this rank's part is done, or raises an error of ringcomm.errors. Nothing is raised while the
  transport can still touch the caller's memory;
- collectives run one at a time, in the order of the calls; point-to-point is independent of them, and ordered per peer
  and tag;
- a rank whose call differs is named on every rank (MismatchError); a late, lost or aborting rank breaks the group: from
  then on every call on every rank raises the first error.

No code outside a transport's own files tests for its class: what differs between transports is a member of `Transport`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

from ringcomm.bootstrap.place import Place
from ringcomm.config import Config
from ringcomm.errors import RingcommError
from ringcomm.native import NULL

__all__ = [
    "NO_FAST_PATH",
    "RECORDED_CALLS",
    "CollectiveCall",
    "FastPath",
    "Fused",
    "LocalTransport",
    "Pending",
    "StreamPending",
    "TransferCall",
    "Transport",
    "TransportModule",
]

# Calls in the flight record of a rank. Shared memory has one entry more, which may be half written.
RECORDED_CALLS = 1023


class TransportModule(Protocol):
    """A module or package of ringcomm.transports that `Config(transport=…)` can name."""

    NEEDS_STORE: bool  # False: the ranks connect without a store, and `connect` gets None

    def serves(self, place: Place) -> bool:
        """Return whether `connect` can connect the ranks of this job."""
        ...

    def connect(self, rank: int, size: int, store: Any, config: Config) -> "Transport":
        """Connect as `rank` of `size` with the ranks that share `store` (bootstrap.store.Store). Collective."""
        ...


class CollectiveCall(NamedTuple):
    """The arguments of a collective, in the order of rc_collective.

    `count`: elements of the array (broadcast, reduce, all_reduce), or of this rank's block (all others).
    `counts`: NULL for equal blocks, else the length of each rank's block; for all_to_all those to send, then those to
    receive. `target` may be `source`, or the one exactly this rank's block of the other. `deferred_mismatch`: see
    rc_call.
    """

    source: Any
    target: Any
    count: int  # type: ignore[assignment]  # in place of tuple.count
    dtype: int
    op: int = 0
    factor: float = 1.0
    root: int = 0
    counts: Any = NULL
    deferred_mismatch: Any = NULL


class TransferCall(NamedTuple):
    """The arguments of a send or receive, in the order of rc_transfer, whose `kind` says which.

    `peer`: of a receive, -1 for any.
    """

    kind: int
    data: Any
    count: int  # type: ignore[assignment]  # in place of tuple.count
    dtype: int
    peer: int
    tag: int
    timeout: float


Fused = Callable[[CollectiveCall, float], None]  # a collective done in one go, within the timeout


class FastPath(Protocol):
    """The common calls, implemented natively. The communicator tries these methods first.

    Each takes the arguments of the communicator's method of that name, and returns its result, with async_op a Work; or
    NotImplemented, before anything has happened, for a call that it does not support or finds wrong. The communicator
    then does the call, or raises the error.
    """

    # The public rows of types.def.
    def barrier(self, timeout: Any, async_op: Any, /) -> Any: ...
    def broadcast(self, x: Any, out: None, root: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def reduce(self, x: Any, out: Any, op: Any, root: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def all_reduce(self, x: Any, out: Any, op: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def gather(self, x: Any, out: Any, root: Any, counts: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def scatter(self, x: Any, out: Any, root: Any, counts: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def all_gather(self, x: Any, out: Any, counts: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def reduce_scatter(self, x: Any, out: Any, op: Any, counts: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def all_to_all(self, x: Any, out: Any, sent: Any, received: Any, timeout: Any, async_op: Any, /) -> Any: ...
    # Those of ringcomm.objects, which takes what they return.
    def broadcast_object(self, obj: Any, root: Any, codec: Any, timeout: Any, /) -> Any: ...
    def gather_object(self, obj: Any, root: Any, codec: Any, timeout: Any, /) -> Any: ...
    def scatter_object(self, objs: Any, root: Any, codec: Any, timeout: Any, /) -> Any: ...
    def all_gather_object(self, obj: Any, codec: Any, timeout: Any, /) -> Any: ...
    def all_to_all_object(self, objs: Any, codec: Any, timeout: Any, /) -> Any: ...
    # As MPI does: arrays of NumPy as bytes.
    def broadcast_bytes(self, x: Any, out: None, root: Any, async_op: Any, /) -> Any: ...
    def gather_bytes(self, x: Any, out: Any, root: Any, async_op: Any, /) -> Any: ...
    def scatter_bytes(self, x: Any, out: Any, root: Any, async_op: Any, /) -> Any: ...
    def all_gather_bytes(self, x: Any, out: Any, async_op: Any, /) -> Any: ...
    def all_to_all_bytes(self, x: Any, out: Any, async_op: Any, /) -> Any: ...
    # Of arrays on a GPU, with async_op, these two return a Startable.
    def send(self, x: Any, peer: Any, tag: Any, timeout: Any, async_op: Any, /) -> Any: ...
    def recv(self, x: Any, peer: Any, tag: Any, at_most: Any, timeout: Any, async_op: Any, /) -> Any: ...
    # As Messages.recv and Messages.exchange; the fields of the Envelope.
    def recv_message(self, x: Any, peer: Any, tag: Any, /) -> Any: ...
    def sendrecv_message(self, x: Any, dest: Any, send_tag: Any, out: Any, source: Any, recv_tag: Any, /) -> Any: ...
    # An empty message is None.
    def send_object(self, obj: Any, peer: Any, tag: Any, codec: Any, /) -> Any: ...
    def recv_object(self, peer: Any, tag: Any, codec: Any, /) -> Any: ...
    def sendrecv(self, x: Any, dest: Any, out: Any, source: Any, tag: Any, timeout: Any, async_op: Any, /) -> Any: ...

    # Let go of the arrays of calls that have ended and whose works were dropped, as each start does.
    def release_ended(self) -> None: ...

    # While they are deferred, collectives return NotImplemented.
    def defer_collectives(self, whether: bool, /) -> None: ...
    def defer_barriers(self, whether: bool, /) -> None: ...

    # Take also arrays on a GPU: address and handle of an rc_gpus, a dict of ON_GPUS of ringcomm.arrays, an ordinal.
    def connect_gpus(self, address: int, gpus: Any, types: Any, ordinal: int, /) -> None: ...
    def disconnect_gpus(self) -> None: ...

    # Start also messages of arrays on a GPU: such a dict, an ordinal, the type of Startables.
    def connect_messages(self, types: Any, ordinal: int, startable: type, /) -> None: ...


def _not_supported(*_: Any) -> Any:
    return NotImplemented


# Of a transport without one.
NO_FAST_PATH = cast(
    FastPath, SimpleNamespace(**dict.fromkeys((name for name in dir(FastPath) if name[0] != "_"), _not_supported))
)


class Pending(Protocol):
    """A started call that may still run."""

    def wait(self, timeout: float) -> int:
        """Wait for the call; return the sender's rank (recv), else -1, or raise its error."""
        ...

    def done(self) -> bool:
        """Return whether the memory is the caller's again."""
        ...

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once this is done, on a thread where it may wait for other calls. Logs its exceptions."""
        ...


class StreamPending(Pending, Protocol):
    """One on a GPU: `wait` makes the current stream wait for its end."""

    on_stream: bool  # whether `wait` returns before the end
    may_release: bool  # whether the memory may be released now: its next use is on a stream that waits

    def finish(self, timeout: float) -> None:
        """Wait for the end itself, or raise its error."""
        ...


class Startable(Pending, Protocol):
    """A message that is yet to be started."""

    def start(self, async_op: bool, /) -> Pending:
        """Return this, started. With `async_op` what is queued next on the current stream does not wait for it."""
        ...

    def result(self, source: int, /) -> int | None:
        """Return what the communicator's call returns: the source that `wait` has returned, or None for a send."""
        ...


class Transport(Protocol):
    """One rank's end of a group."""

    name: str
    rank: int
    size: int
    timeout: float
    handle: Any  # the rc_comm: messages, splits, staging and traces take it, so a transport needs the native core
    fused: Mapping[str, Fused]
    fast_path: FastPath
    left_out_pids: Sequence[int]  # processes left out by the `shrink` that made this group, if on one host

    @property
    def as_local(self) -> "LocalTransport | None":
        """This transport, if all its ranks share the memory of one machine: then their GPUs may share theirs."""
        ...

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> Pending:
        """Queue `fused[collective](call, timeout)`; the caller keeps the memory alive until it is done."""
        ...

    def transfer(self, transfer: TransferCall) -> int:
        """Send or receive; return the sender's rank, -1 for a send."""
        ...

    def exchange(self, sent: TransferCall, received: TransferCall) -> int:
        """Send and receive at once, so that a ring of such calls cannot deadlock; return the sender's rank."""
        ...

    def start_transfer(self, transfer: TransferCall) -> Pending: ...

    def collective_on_gpus(self, staging: Any, name: str, call: CollectiveCall, timeout: float) -> bool:
        """Do a collective on the GPUs of several hosts, and between the hosts by `staging`, a Staging; wait for it.

        Collective. False: not supported here; nothing was done, and all data has to be staged in host memory.
        """
        ...

    def allocate(self, description: str, size: int) -> Any:
        """Return `size` zero bytes that the peers access directly, as a writable buffer that keeps them alive.

        Collective. `description`, that of the user's call, must be the same on every rank (MismatchError). Raises
        MemoryShortage on every rank if one of them has too little.
        """
        ...

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a block in which NumPy allocates where the peers reach it; if no peer can, it has no effect."""
        ...

    def split(self, color: int | None, key: int) -> "Transport | None":
        """Make a group of the ranks with the same color, ordered by key, then rank; None without a color.

        Collective. Closing this group does not affect the new one.
        """
        ...

    def shrink(self, timeout: float) -> "Transport":
        """Make a group of the ranks that call this too, in their old order, although this group is broken.

        Waits for ranks that run but do not call it for `timeout` seconds. Raises Aborted if the others have continued
        without this rank.
        """
        ...

    def all_gather_facts(self, name: str, fact: Any, timeout: float = -1.0) -> list[Any]:
        """Return the facts of all ranks, which travel as JSON. Collective, under the name of the call that needs it."""
        ...

    def run_on_all(self, name: str, action: Callable[[], Any], timeout: float = -1.0) -> list[Any]:
        """Return the results of `action` on all ranks. If it raises on one, every rank raises. Collective."""
        ...

    def recorded(self, call: str) -> AbstractContextManager[None]:
        """Enter "shrink" or "grow" into the flight record, from the beginning of the block to its end."""
        ...

    def fail(self, error: RingcommError) -> None:
        """Break the group: every call on any rank, waiting or later, raises this error."""
        ...

    def close(self) -> bool:
        """Leave the group. Idempotent; peers that still need this rank raise PeerLost. Then no memory is in use.

        False: this is a signal handler in the middle of a call, which ends first; then close again.
        """
        ...

    def check(self) -> None:
        """Raise the first failure of the group, if any."""
        ...

    def path(self) -> tuple[str, int]:
        """Return the path of this rank's last collective, and its number of chunks."""
        ...

    def report(self, calls: int) -> str:
        """Return the last `calls` (>= 1) calls of every rank, as far as recorded; one line per rank."""
        ...


class LocalTransport(Transport, Protocol):
    """A transport whose ranks share the memory of one machine. Groups of GPUs are built on it."""

    def split(self, color: int | None, key: int) -> "LocalTransport | None": ...

    def reserve_group(self, size: int) -> int:
        """Reserve memory for a group of `size` of these ranks, and return its offset for `open_group`."""
        ...

    def open_group(self, offset: int, members: Sequence[int], timeout: float) -> "LocalTransport":
        """Return a group of these ranks, in memory that one of them has reserved. Its failures are its own.

        Unlike `split`, the members alone call it, and none waits for another.
        """
        ...

    def lost(self) -> list[int]:
        """Return the ranks that have died or closed."""
        ...
