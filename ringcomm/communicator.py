"""The communicator checks and shapes the arguments of every call; one call of the transport does the rest."""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from math import prod
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ringcomm import objects
from ringcomm.arrays.adapters import ADAPTERS, check_disjoint, checked_output, dtype_of, find_device
from ringcomm.bootstrap.place import Place
from ringcomm.config import dump_folder
from ringcomm.errors import Aborted, ArgumentError, MismatchError, RingcommError, describe_error, integer, refuse
from ringcomm.native import NULL, check, failure_observers, lib, seconds
from ringcomm.pending import PendingCalls, PendingWork, SendRecvPending
from ringcomm.shapes import Shapes, check_shape
from ringcomm.trace.recorder import MARK_BYTES, group_id, record, record_if_asked
from ringcomm.transports.calls import CollectiveCall, Startable, TransferCall
from ringcomm.transports.contract import Transport
from ringcomm.transports.routing import ArrayRouter
from ringcomm.types import COLLECTIVES, PremulSum, reduction
from ringcomm.work import Work

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from ringcomm.devices.device import Device
    from ringcomm.transports.messages import Messages

__all__ = ["Communicator", "open_transports"]

log = logging.getLogger("ringcomm")

Op = str | PremulSum
ANY = -1  # the peer of a recv from any source

open_transports: set[Transport] = set()  # of this process


def _dump_if_asked(error: RingcommError) -> None:
    if dump_folder():  # to import a module could fail where no descriptor is left
        from ringcomm.trace.dump import dump_if_asked

        dump_if_asked(open_transports, error)


failure_observers.append(_dump_if_asked)


class Communicator:
    """A group of ranks. All ranks call the same collectives in the same order.

    Arrays are NumPy arrays, PyTorch tensors, CuPy arrays, or objects with the buffer protocol, DLPack in host memory
    or `__cuda_array_interface__`. They must be C-contiguous, and outputs writable; an object with DLPack counts as
    read-only before DLPack 1.0 or NumPy 2.1. A result of the input's shape is written in place unless `out` is given;
    a result of another shape is a new array of the input's kind unless `out` is given. `out` may be the input itself
    or, where one array contains the other, exactly the matching part.

    Calls on GPU arrays follow the order of the current stream, CuPy's or torch's. They return once launched; a later
    call raises their errors.

    `timeout` is in seconds; None takes the communicator's. With `async_op=True` a call returns a `Work` at once, whose
    `wait()` returns the result.

    Raises:
        ArgumentError: A wrong argument. Nothing was sent; the communicator stays usable.
        MismatchError: The ranks' calls differ. Raised on every rank; the communicator stays usable.
        CollectiveTimeout: A rank did not arrive in time. Like the next two and KeyboardInterrupt this breaks the
            communicator: every later call on every rank raises the first error.
        PeerLost: A rank died, or closed the communicator while it was needed.
        Aborted: A rank called `abort`, or an exception ended its `with` block.
    """

    def __init__(self, transport: Transport, job: "ElasticJob | None" = None, place: Place | None = None) -> None:
        """`place`: that of this process in the job; None: a job begins with this communicator."""
        self._transport, self._router = transport, ArrayRouter(transport)
        self._job = job
        self.rank, self.size, self.timeout = transport.rank, transport.size, transport.timeout
        self._shapes = Shapes(self.rank, self.size)
        self._fused = self._router.fused
        self.fast_path = transport.fast_path
        self._pending = PendingCalls(transport)
        open_transports.add(transport)
        # Runs once: from close(), when the communicator is collected, or at exit. Then no memory of pending calls is in
        # use any more.
        self._close = weakref.finalize(self, _close, transport, self._router, self._pending)
        try:
            self._place = place or Place(self.rank, self.size, job=group_id(transport.handle))
            record_if_asked(transport.handle, self.rank, self.size, self._place)
        except RingcommError:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        return f"<ringcomm.Communicator rank {self.rank} of {self.size}, {self._router.name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is not None:
                with suppress(RingcommError):  # closed, or the parent process's: the block's own error matters
                    self.abort(describe_error(error))
        finally:
            with suppress(RingcommError) if error is not None else nullcontext():
                self.close()

    # --- Collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Any, op: Op = "sum", out: Any = None, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Reduce x over all ranks, element by element. Every rank gets the same bits. Returns x or `out`."""
        if (done := self.fast_path.all_reduce(x, out, op, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("all_reduce", x, out, timeout, async_op, op=op)

    def reduce(
        self,
        x: Any,
        op: Op = "sum",
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce x over all ranks on `root`. Returns x or `out` there; elsewhere None, and x is unchanged."""
        if (done := self.fast_path.reduce(x, out, op, root, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("reduce", x, out, timeout, async_op, op=op, root=root)

    def broadcast(self, x: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Copy x of `root` into x of every rank. Returns x."""
        if (done := self.fast_path.broadcast(x, None, root, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("broadcast", x, None, timeout, async_op, root=root)

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        r"""Collect x of all ranks on every rank, in rank order.

        Returns an array of shape (size, \*x.shape). With `counts`, the number of rows of each rank, the arrays are
        concatenated along axis 0.
        """
        if (done := self.fast_path.all_gather(x, out, counts, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("all_gather", x, out, timeout, async_op, counts=counts)

    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Collect x of all ranks on `root`, in rank order. Returns there what all_gather returns, elsewhere None."""
        if (done := self.fast_path.gather(x, out, root, counts, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("gather", x, out, timeout, async_op, root=root, counts=counts)

    def scatter(
        self,
        x: Any = None,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        r"""Divide axis 0 of `root`'s x among the ranks: equal shares, or `counts` rows for each rank.

        On the other ranks x is None, and `out` is required. Returns this rank's share, of shape
        (rows of this rank, \*x.shape[1:]).
        """
        if (done := self.fast_path.scatter(x, out, root, counts, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("scatter", x, out, timeout, async_op, root=root, counts=counts)

    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        r"""Reduce x over all ranks and divide axis 0 of the result among them: equal shares, or `counts` rows.

        Returns this rank's share, of shape (rows of this rank, \*x.shape[1:]).
        """
        if (done := self.fast_path.reduce_scatter(x, out, op, counts, timeout, async_op)) is not NotImplemented:
            return done
        return self._collective("reduce_scatter", x, out, timeout, async_op, op=op, counts=counts)

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send block j of axis 0 of x to rank j, and receive block i of the result from rank i.

        Equal blocks are exchanged in place unless `out` is given. With `send_counts` and `recv_counts`, the number of
        rows to and from each rank, the result is a new array unless `out` is given.
        """
        if (
            done := self.fast_path.all_to_all(x, out, send_counts, recv_counts, timeout, async_op)
        ) is not NotImplemented:
            return done
        if (send_counts is None) != (recv_counts is None):
            message = "all_to_all needs both send_counts and recv_counts, or neither"
            raise ArgumentError(message, rank=self.rank, collective="all_to_all")
        counts = None if send_counts is None else (send_counts, recv_counts)
        return self._collective("all_to_all", x, out, timeout, async_op, counts=counts)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until all ranks have called this."""
        if (done := self.fast_path.barrier(timeout, async_op)) is not NotImplemented:
            return done
        run = self._queue("barrier", None) if async_op else self._fused["barrier"]
        return run(CollectiveCall(NULL, NULL, 0, 0), seconds(timeout))

    def _await_close(self, timeout: float | None = None) -> Work:
        """Start to wait until all ranks have called this and are about to close; in errors it is `close()`."""
        return self._queue("close", None)(CollectiveCall(NULL, NULL, 0, 0), seconds(timeout))

    # --- Point to point -----------------------------------------------------------------------------------------------

    def send(self, x: Any, peer: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send x to `peer`, in order per peer and tag. A large array may wait for its receiver."""
        if (done := self.fast_path.send(x, peer, tag, timeout, async_op)) is not NotImplemented:
            return self.started(done, x) if async_op else done
        memory = ADAPTERS[type(x)].memory(x, False)
        sent = TransferCall(lib.RC_SEND, *memory, self._peer("peer", peer), *_options(tag, timeout))
        if async_op:
            return self._start_transfer(sent, x)
        self._router.transfer(sent)
        return None

    def recv(
        self,
        x: Any,
        peer: int | None = None,
        tag: int = 0,
        *,
        at_most: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive into x from `peer`, None for any rank. Returns the rank of the sender.

        With `at_most` the message may be shorter than x: it fills the front of x and leaves the rest.
        """
        if (done := self.fast_path.recv(x, peer, tag, at_most, timeout, async_op)) is not NotImplemented:
            return self.started(done, x) if async_op else done
        memory, kind = ADAPTERS[type(x)].memory(x, True), lib.RC_RECV_AT_MOST if at_most else lib.RC_RECV
        received = TransferCall(kind, *memory, self._source("peer", peer), *_options(tag, timeout))
        return self._start_transfer(received, x) if async_op else self._router.transfer(received)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int | None,
        tag: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send x to `dest` while receiving `out` from `source`, None for any rank. Returns the rank of the sender."""
        if (done := self.fast_path.sendrecv(x, dest, out, source, tag, timeout, async_op)) is not NotImplemented:
            return done
        given, got = ADAPTERS[type(x)].memory(x, False), ADAPTERS[type(out)].memory(out, True)
        options = _options(tag, timeout)
        sent = TransferCall(lib.RC_SEND, *given, self._peer("dest", dest), *options)
        received = TransferCall(lib.RC_RECV, *got, self._source("source", source), *options)
        if async_op:
            check_disjoint(given, got)  # the two native calls cannot compare their memory
            works = self._start_transfer(sent, x), self._start_transfer(received, out)
            return PendingWork(SendRecvPending, works, _source, (x, out), self._pending)
        return self._router.exchange(sent, received)

    @cached_property
    def messages(self) -> "Messages":
        """Messages as MPI matches them: from any source, with any tag, of any length up to that of the array."""
        from ringcomm.transports.messages import Messages

        return Messages(self._transport.handle)

    # --- Python objects -----------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Return the object of `root` on every rank. It travels pickled: up to 464 bytes in one broadcast, else in two.

        NumPy arrays of 64 KiB and more, also in its lists, tuples and dicts, are not copied into the pickle: each is
        a broadcast of its own. `timeout` applies to each. If the object cannot be pickled, every rank raises
        RingcommError with `root`; the communicator stays usable.
        """
        return objects.broadcast(self, obj, self._peer("root", root), timeout)

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Return the objects of all ranks in rank order; see broadcast_object."""
        return objects.all_gather(self, obj, timeout)

    def gather_object(self, obj: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """Return the objects of all ranks in rank order on `root`, None elsewhere; see broadcast_object.

        Up to 464 bytes travel in one gather, in which only the root waits for the others; a longer object follows as
        a message. If an object cannot be pickled, the root and its rank raise the error.
        """
        return objects.gather(self, obj, self._peer("root", root), timeout)

    # --- Groups, memory, ends -----------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Make a communicator of the ranks with the same color, ordered by key, then rank. Collective.

        Ranks that are in no group call it too, with color None, and get None. The new communicator inherits the
        timeout and stays usable after this one is closed. Raises MemoryShortage on every rank if one has too little.
        """
        transport = self._router.split(None if color is None else integer("color", color), integer("key", key))
        return None if transport is None else Communicator(transport, place=self._place)

    def shrink(self, *, timeout: float | None = None) -> "Communicator":
        """Continue without lost ranks: make a communicator of the survivors, in their old order.

        All survivors call it, after PeerLost, CollectiveTimeout or Aborted; so may a rank that has not
        noticed the loss. It waits `timeout` seconds for ranks that run but do not call it, and then leaves them out,
        like ranks that are lost meanwhile. Pending calls of this communicator end with its error, and it is closed.
        Memory from `empty` and `shared_arrays` stays readable. A warning names each rank that is left out although it
        runs; `ringcomm run --respawn` ends and restarts it. As ULFM's MPI_Comm_shrink (Bland et al., Post-failure
        recovery of MPI communication capability, 2013).

        Raises Aborted if the others have continued without this rank.
        """
        with self._transport.recorded("shrink"):
            transport, left_out_pids = self._transport.shrink(seconds(timeout))
        shrunk = Communicator(transport, self._job, self._place)
        if self._job:
            self._job.resume(shrunk, left_out_pids)
        self._close_replaced()
        return shrunk

    def grow(self, *, timeout: float | None = None) -> "Communicator":
        """Admit the ranks that `ringcomm run --respawn` has restarted: make a communicator of all.

        All ranks call it; in a restarted rank `ringcomm.init` returns the same communicator. It waits for missing ranks
        for `timeout` seconds (that of rank 0 counts) and continues with the ranks that have joined, in the order of the
        job. This communicator is closed, unless nobody has joined: then it is returned. If the start of the new one
        fails, as with PeerLost when a rank dies while it joins, all ranks raise the error,
        and this one stays usable, unless it has lost a rank itself.

        Raises ArgumentError if nothing restarts lost ranks: without --respawn, or with --respawn 0.
        """
        if self._job is None:
            raise ArgumentError("grow needs a communicator of all ranks, started with ringcomm run --respawn")
        with self._transport.recorded("grow"):
            grown = self._job.grow(self, self.timeout if timeout is None else seconds(timeout))
        if grown is None:
            return self
        self._close_replaced()
        return grown

    def empty(self, shape: int | Sequence[int], dtype: "DTypeLike", device: str = "host") -> Any:
        """Make a symmetric buffer: a zero-filled array that the peers access directly. Collective.

        All ranks pass the same arguments (else MismatchError). Contiguous views of the array are symmetric too. The
        memory lives as long as any view of it. Raises MemoryShortage on every rank if one has too little.
        """
        kind, _ = dtype_of(dtype)
        lengths = check_shape(shape, kind.itemsize)
        description, size = f"empty({lengths}, {kind.name}, {device})", prod(lengths) * kind.itemsize
        if device == "host":
            return np.ndarray(lengths, kind, self._router.allocate(description, size))
        target: Device = find_device(device)
        return target.array(self._router.allocate_on(target, description, size), lengths, kind)

    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a block in which NumPy's arrays of 64 KiB and more live in memory that the peers access directly. ::

            with comm.shared_arrays():
                x = np.ones(1 << 20)
            comm.all_reduce(x)  # nothing is staged

        Not collective. It applies to all arrays that NumPy makes in this thread (or task), those that ringcomm returns
        included, and any view of them; an array stays shared, and valid, as long as it is referenced. A thread started
        inside makes private arrays. A call of at least `direct_bytes` is direct if the arrays that it accesses in other
        ranks are shared, at whatever offsets; others are staged as usual.

        Such an array takes whole pages of memory at once, in 4 KiB pages as a rule. When memory is short, arrays are
        private, with one warning. The child of a fork sees the parent's shared arrays, not copies of them. Ranks on
        other hosts do not reach them.
        """
        return self._transport.shared_arrays()

    @contextmanager
    def trace(self, folder: str | PathLike[str]) -> Iterator[None]:
        """Record the calls of this rank in the body, in a file of its own in the folder, for `ringcomm trace`.

        Not collective, though a trace of all ranks tells more. A call takes some 30 ns more. The variable
        RINGCOMM_TRACE=folder does the same for all communicators. A trace inside another one interrupts that: each call
        is in one of them. Raises ArgumentError if the file cannot be made, as on a full disk.
        """
        end = record(self._transport.handle, self.rank, self.size, self._place, folder)
        try:
            yield
        finally:
            with suppress(RingcommError):  # closed
                end()

    def mark(self, name: str) -> None:
        """Add a mark to the trace, as at the end of a training step.

        Without a trace it does nothing. Raises ArgumentError if the name has more than 35 bytes of UTF-8.
        """
        if not isinstance(name, str):
            raise refuse("name", "a string", repr(name))
        text = name.replace("\0", "").encode(errors="replace")
        if len(text) > MARK_BYTES:
            raise refuse("name", f"at most {MARK_BYTES} bytes", f"{len(text)}: {name!r}")
        check(lib.rc_trace_mark(self._transport.handle, text))

    def abort(self, reason: str | Aborted) -> None:
        """Break the communicator: every pending and later call on every rank raises Aborted.

        The error names this rank and the reason. An Aborted, as another communicator raised it, is passed on unchanged.
        """
        if isinstance(reason, str):
            error = Aborted(f"rank {self.rank} aborted: {reason}", rank=self.rank)
        elif isinstance(reason, Aborted):
            error = Aborted(str(reason), rank=reason.rank)  # without its traceback, which would keep arrays alive
        else:
            raise refuse("reason", "a string, or an Aborted", repr(reason))
        self._transport.fail(error)

    def close(self) -> None:
        """Leave the communicator. Idempotent. Peers that still need this rank raise PeerLost.

        Raises the error of a call that has ended and whose work was dropped, if nothing has raised it before.

        In a signal handler that has interrupted a call of this communicator, close only ends that call; close again
        to release the memory of pending works.
        """
        self._pending.release_ended()
        closed = True  # also where it raises, because messages are lost, or the error of a dropped work is
        try:
            closed = self._router.close()
        finally:
            if closed:
                self._close()
                if self._job:
                    self._job.leave(self)

    def check(self) -> None:
        """Raise the first failure of the communicator, if any, else a mismatch that no call has raised yet."""
        self._pending.release_ended()
        self._router.check()
        self._transport.check_calls()
        self._router.check_dropped()

    def synchronize(self) -> None:
        """Wait until the launched calls on GPU arrays have ended, and raise the first failure, if any.

        Not collective. What a replay of a CUDA graph does is not waited for, but its failure is raised, too.
        """
        self._router.synchronize()
        self.check()

    def report(self, calls: int = 3) -> str:
        """Print the last `calls` calls of every rank, at most 1023, and what each rank waits for. Returns the text."""
        text = self._transport.report(integer("calls", calls, 1))
        print(text, end="")
        return text

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _close_replaced(self) -> None:
        """Close, and raise nothing: the other ranks go on in the communicator that replaces this one."""
        try:
            self.close()
        except MismatchError as error:
            log.warning("of the communicator that was replaced: %s", error)
        except RingcommError:  # messages that were lost
            pass

    def _collective(
        self,
        name: str,
        x: Any,
        out: Any,
        timeout: float | None,
        async_op: bool,
        *,
        op: Op = "sum",
        root: int = 0,
        counts: Any = None,
    ) -> Any:
        """Do a call that the fast path has left: its row of types.def says what is given and got, and by which ranks.

        `counts` are those of an all_to_all as a pair. Returns x, `out` or a new array, or a `Work`.
        """
        row, root = COLLECTIVES[name], self._peer("root", root)
        gets = row.gets(self.rank, root)
        if row.gives(self.rank, root) or row.in_place:
            adapter, in_place = ADAPTERS[type(x)], row.in_place and out is None and counts is None
            source, _, dtype = adapter.memory(x, in_place and row.writes_back(self.rank, root))
            shape, count, blocks = self._shapes.result(row, adapter.shape(x), counts)
            if not gets:
                out, target = None, NULL
            elif in_place:
                out, target = x, source
            else:
                out = adapter.empty(x, shape) if out is None else out
                target = checked_output(out, prod(shape), dtype)
        else:
            adapter = ADAPTERS[type(self._required(name, out, root))]
            source, (target, count, dtype) = NULL, adapter.memory(out, True)
            blocks = self._shapes.joined(adapter.shape(out), counts)[1]
        code, factor = reduction(op)
        run = self._queue(name, out, x) if async_op else self._fused[name]
        call = CollectiveCall(source, target, count, dtype, code, factor, root, blocks)
        return run(call, seconds(timeout)) or out

    def _required(self, name: str, out: Any, root: int) -> Any:
        if out is None:
            what, expected = f"out of {name} on rank {self.rank}", f"an array, since only root {root} has x"
            raise refuse(what, expected, None, rank=self.rank, collective=name)
        return out

    def _queue(self, collective: str, result: Any, *arrays: Any) -> Callable[..., Work]:
        def start(call: CollectiveCall, timeout: float) -> Work:
            queued = collective, call, timeout
            return PendingWork(self._router.start, queued, lambda _: result, arrays, self._pending)

        return start

    def started(self, message: Work | Startable, arrays: object) -> Work:
        """Return a message that the fast path has started, or start one that it has prepared, as on a GPU."""
        if isinstance(message, Work):
            return message
        return PendingWork(message.start, (True,), message.result, arrays, self._pending)

    def _start_transfer(self, transfer: TransferCall, x: Any) -> Work:
        result = _nothing if transfer.kind == lib.RC_SEND else _source
        return PendingWork(self._router.start_transfer, (transfer,), result, x, self._pending)

    def _peer(self, what: str, rank: int) -> int:
        if type(rank) is not int:
            rank = integer(what, rank)
        if not 0 <= rank < self.size:
            raise refuse(what, f"a rank from 0 to {self.size - 1}", rank, rank=self.rank)
        return rank

    def _source(self, what: str, rank: int | None) -> int:
        return ANY if rank is None else self._peer(what, rank)


class ElasticJob(Protocol):
    """A job whose launcher restarts lost ranks, as one of its ranks sees it: see elastic.py."""

    def grow(self, comm: Communicator, timeout: float) -> Communicator | None:
        """Return the communicator of all, `comm` being that of the members; None if no rank has joined."""
        ...

    def resume(self, comm: Communicator, left_out_pids: Sequence[int]) -> None:
        """Resume with a communicator that was shrunk, without these processes, which run but did not call `shrink`."""

    def leave(self, comm: Communicator) -> None:
        """Note that this communicator is closed: if it is the last one, this rank cannot call `grow` any more."""


def _close(transport: Transport, router: ArrayRouter, pending: PendingCalls) -> None:
    try:
        pending.release_ended()
        router.close()
    finally:
        pending.clear()
        transport.fast_path.release_ended()
        open_transports.discard(transport)


def _nothing(_: int) -> None:
    """Return the result of a send."""


def _source(source: int) -> int:
    """Return the result of a receive."""
    return source


def _options(tag: int, timeout: float | None) -> tuple[int, float]:
    """Return tag and timeout as the transport takes them."""
    if tag or type(tag) is not int:
        tag = integer("tag", tag)
    return tag, -1.0 if timeout is None else seconds(timeout)
