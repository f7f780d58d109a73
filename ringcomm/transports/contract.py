"""What a transport promises. `ringcomm.testing.check_transport` is this contract as a test.

A transport moves bytes between the ranks of one group. Its module has a function `connect` that makes the world; the
communicator checks and shapes the arguments, the transport does the rest:

- pointers are cdata that ringcomm.buffer made, or `native.NULL`; counts are elements; dtypes and operations have the
  codes of ringcomm.types; timeouts are seconds, negative for the group's own;
- a call returns when this rank's part is done, or raises an error of ringcomm.errors. Nothing is raised while the
  transport can still touch the caller's memory;
- collectives run one at a time, in the order of the calls; point-to-point is independent of them, and ordered per peer
  and tag;
- a rank that calls something else is named on every rank (MismatchError); a late, lost or aborting rank breaks the
  group: all ranks raise the first reason, from then on at every call.

A transport may spare the usual blocking call the way through Python. Then it has an attribute `quick` with methods
that the communicator tries first. Each gets what the communicator's method of that name got: x, out (None for
broadcast), then op and root where there are any, then the rest. It returns what that method returns; or NotImplemented,
before anything has happened, if it does not know how to do the call or finds something wrong with it: what to do, or to
say, is the communicator's to know.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ringcomm.devices.contract import Device
from ringcomm.transports.blocks import Blockwise

__all__ = ["NOT_QUICK", "Fused", "OverHosts", "Pending", "Transport"]


class Fused(Protocol):
    """A collective done in one go.

    `count`: elements of the array (broadcast, reduce, all_reduce), or of this rank's block (all others).
    `counts`: NULL for equal blocks, else the length of each rank's block; for all_to_all those to send, then those to
    receive. `target` may be `source`, or the one exactly this rank's block of the other.
    """

    def __call__(
        self,
        source: Any,
        target: Any,
        count: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        counts: Any,
        timeout: float,
        /,
    ) -> None: ...


@runtime_checkable
class OverHosts(Protocol):
    """A transport whose ranks live on several hosts, each with GPUs of its own."""

    def gpus_meet(self, device: Device) -> bool:
        """Say whether the GPUs of every host reach each other. Collective, the first time."""
        ...

    def all_reduce_on_gpus(self, call: Blockwise, timeout: float) -> None:
        """Do it, and wait for it."""
        ...


class _NotQuick:
    """Stands for the `quick` of a transport that has none."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: NotImplemented


NOT_QUICK = _NotQuick()


class Pending(Protocol):
    """A call that was started and may still run."""

    def wait(self, timeout: float) -> int:
        """Return the rank that sent (recv), else -1, once the call is done; raise what the call would have raised."""
        ...

    def done(self) -> bool:
        """Say whether the memory is the caller's again."""
        ...

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once this is done, on a thread where it may wait for others. What it raises is logged."""
        ...


class Transport(Protocol):
    """One rank's end of a group."""

    name: str
    rank: int
    size: int
    timeout: float
    fused: Mapping[str, Fused]

    def start(self, collective: str, *call: Any) -> Pending:
        """Queue `fused[collective](*call)`; the caller keeps the memory alive until it is done."""
        ...

    def send(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> None: ...

    def recv(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> int:
        """Return the rank that sent; `peer` -1 takes any."""
        ...

    def sendrecv(
        self,
        data: Any,
        count: int,
        dtype: int,
        dest: int,
        target: Any,
        target_count: int,
        target_dtype: int,
        source: int,
        tag: int,
        timeout: float,
    ) -> int:
        """Send and receive at once, so that a ring of them cannot deadlock; return the rank that sent."""
        ...

    def isend(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> Pending: ...

    def irecv(self, data: Any, count: int, dtype: int, peer: int, tag: int, timeout: float) -> Pending: ...

    def allocate(self, words: str, size: int) -> Any:
        """Return `size` zero bytes that the peers reach directly, as a writable buffer that keeps them alive.

        A collective. `words` say what the user asked for and must be the same on every rank (MismatchError).
        Raises MemoryShortage on every rank, if one has not enough.
        """
        ...

    def split(self, color: int | None, key: int) -> "Transport | None":
        """Make a group of the ranks with the same color, ordered by key, then rank; None without a color.

        A collective. The new group lives on when this one is closed.
        """
        ...

    def abort(self, reason: str) -> None:
        """Break the group: every call on any rank, waiting or later, raises Aborted with this reason."""
        ...

    def close(self) -> bool:
        """End this rank's part. Idempotent; peers that still need it get PeerLost. No memory is touched afterwards.

        False: a signal handler closes what it has interrupted; the interrupted call ends first, then close again.
        """
        ...

    def check(self) -> None:
        """Raise the first failure of the group, if there was one."""
        ...

    def way(self) -> tuple[str, int]:
        """Return how the last collective of this rank was done, by the name of the way, and in how many chunks."""
        ...

    def report(self, calls: int) -> str:
        """Return the last `calls` (>= 1) calls of every rank, as far as they are recorded; a line for each rank."""
        ...
