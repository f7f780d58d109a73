"""The calls that a transport carries out: their arguments, and what stands for one that may still run."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ringcomm.callbacks import when_done
from ringcomm.native import NULL, check, ffi, lib

__all__ = ["CollectiveCall", "Fused", "NativeWork", "Pending", "Startable", "StreamPending", "TransferCall"]


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


class NativeWork:
    """A call queued in the native core."""

    def __init__(self, handle: Any) -> None:
        self.handle = ffi.gc(handle, lib.rc_work_free)

    def wait(self, timeout: float) -> int:
        source = ffi.new("int *", -1)
        check(lib.rc_work_wait(self.handle, timeout, source))
        return int(source[0])

    def done(self) -> bool:
        return bool(lib.rc_work_done(self.handle))

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        when_done(self.handle, callback)


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
