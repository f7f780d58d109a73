"""A private MPI communicator and the collectives on it: a signature check, and the schedules of algorithms.

Nothing blocks inside MPI. The started requests are tested again and again, and between tests the caller checks
deadlines, failures and signals. MPI keeps the order of messages per pair and direction, so they carry no numbers.
"""

import atexit
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringcomm.algorithms.schedule import NO_PEER, Algorithm, Block, Copy, Lengths, record
from ringcomm.errors import CollectiveTimeout, RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import NOTHING, Blockwise, Bytes, Steps
from ringcomm.transports.mpi import builtin

__all__ = ["Rail", "Wait", "abandon", "combine", "with_timeout"]

log = logging.getLogger("ringcomm")

# Wait until the function returns true; the ranks are those it depends on.
Wait = Callable[[Callable[[], bool], Sequence[int]], Steps]
T = TypeVar("T")
Numbers = NDArray[np.int64]

CHUNK = 1 << 20  # bytes of a message: one is reduced while the next arrive
WINDOW = 8  # posted receives: with fewer, Open MPI over TCP leaves a third of a link unused
CACHED = 256  # schedules, for calls that repeat
CANCEL = 1.0  # seconds that a failed call waits for receives that have begun to arrive
PAUSE = 1e-3  # seconds between tests of these
GRACE = 2.0  # seconds for the other ranks to handle a failure, before the exit of this one aborts the job
ABORT = 5  # seconds for MPI_Abort, before the process ends without it
SPINS = 1000  # tests before a wait yields to other calls
SPINS_OVERSUBSCRIBED = 30  # where ranks share cores: each test yields the core
HUGE = 4 << 20  # NumPy requests huge pages for arrays of this size: the kernel copies them several times as fast


def combine(target: Bytes, sources: list[Bytes], dtype: int, op: int, factor: float = 1.0) -> None:
    """Reduce the sources in their order into `target`, which may be one of them."""
    pointers = ffi.new("void *[]", [ffi.from_buffer(each) for each in sources])
    count = target.size // lib.rc_dtype_bytes(dtype)
    check(lib.rc_reduce(ffi.from_buffer(target), pointers, len(sources), count, dtype, op, factor))


Segment = tuple[int, int, int]  # the index of a buffer of the call, and a range of its bytes


class MessageStep(NamedTuple):
    """A step of a schedule as messages; without a peer it is a copy."""

    dest: int
    outgoing: list[Segment]
    source: int
    incoming: list[Segment]
    operands: list[Segment] | None


class MessageSchedule(NamedTuple):
    """A schedule cut into messages."""

    steps: list[MessageStep]
    scratch: int  # bytes


def cut(block: Block, item: int) -> list[Segment]:
    begin, end = block.begin * item, block.end * item
    return [(block.memory, first, min(first + CHUNK, end)) for first in range(begin, end, CHUNK)]


_abandoned: list[object] = []  # memory that MPI may still use after a failure, and unfinished calls
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandoned.clear)


def abandon(what: object) -> None:
    """Keep something that MPI may still use alive for ever, and abort the job at exit."""
    _abandoned.append(what)


@atexit.register
def _abort_if_abandoned() -> None:
    """Abort the job: MPI_Finalize would wait, perhaps for ever, for what a failure has left in flight."""
    if _abandoned:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        time.sleep(GRACE)
        log.warning("MPI_Abort: communication is in flight that will not end, and MPI_Finalize might not return")
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ABORT)  # MPI_Abort itself may wait for an unreachable host
        MPI.COMM_WORLD.Abort(1)


def with_timeout(timeout: float, description: str, call: Callable[[], T]) -> T:
    """Return `call()`, which blocks inside MPI; raise CollectiveTimeout if it takes too long.

    Below MPI_THREAD_MULTIPLE no other thread can watch the clock, and there is no timeout.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call()
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = start_thread("ringcomm MPI", run)
    try:
        return result.result(timeout)
    except FutureTimeout:
        abandon(thread)
        text = f"{description} took more than {timeout:g} s: a rank did not join, or is lost"
        raise CollectiveTimeout(text) from None
    except BaseException:
        if not result.done():  # it was interrupted
            abandon(thread)
        raise


class Rail:
    """This rank's end of a private MPI communicator.

    Its members are all ranks of a group, or, where hosts have several ranks, the ranks of one index on each host.
    """

    def __init__(self, comm: Any, oversubscribed: bool) -> None:
        from mpi4py import MPI

        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent = 0  # bytes of the data of collectives
        self._comm, self._mpi, self._oversubscribed = comm, MPI, oversubscribed
        self._spins = SPINS_OVERSUBSCRIBED if oversubscribed else SPINS
        self._landing = [NOTHING]  # buffers that receive what will be reduced
        self._scratch = NOTHING
        self._schedules: dict[object, MessageSchedule] = {}
        self._receives: deque[Any] = deque()  # requests in flight
        self._others: deque[Any] = deque()
        self._healthy = True

    def split(self, color: int | None, key: int, timeout: float) -> "Rail | None":
        """Return the rail of the ranks with the same color."""
        number = self._mpi.UNDEFINED if color is None else color
        with self._mpi_errors():
            comm = with_timeout(timeout, "MPI_Comm_split", lambda: self._comm.Split(number, key))
        return None if color is None else Rail(comm, self._oversubscribed)

    def free(self) -> None:
        """Give the communicator back to MPI, unless a failure has left requests in flight, which MPI would wait for."""
        if self._healthy:
            with self._mpi_errors():
                self._comm.Free()

    # --- Collectives of the rail ----------------------------------------------------------------------------------

    def maximum(self, numbers: Numbers, wait: Wait) -> Generator[None, None, Numbers]:
        """Return the elementwise maximum over all ranks."""
        start = partial(self._comm.Iallreduce, op=self._mpi.MAX)
        return self._numbers(start, numbers, np.empty_like(numbers), wait)

    def gather_all(self, numbers: Numbers, wait: Wait) -> Generator[None, None, Numbers]:
        """Return the numbers of all ranks, one row each."""
        return self._numbers(self._comm.Iallgather, numbers, np.empty((self.size, numbers.size), np.int64), wait)

    def _numbers(
        self, start: Callable[..., Any], numbers: Numbers, result: Numbers, wait: Wait
    ) -> Generator[None, None, Numbers]:
        with self._using(numbers, result):
            self._others.append(start(numbers, result))
            if not self._all_done():
                yield from wait(self._all_done, range(self.size))
        return result

    def collective(
        self,
        algorithm: Algorithm,
        source: Bytes,
        target: Bytes,
        lengths: Lengths,
        dtype: int,
        op: int,
        root: int,
        wait: Wait,
        skip: frozenset[int] = frozenset(),
    ) -> Steps:
        """Run the collective of this algorithm. `source` and `target` are one array where the result replaces x.

        This rank's own data is copied first, as `record` expects. No data is exchanged with the ranks in `skip`.
        """
        name, me = algorithm.collective, self.rank
        item = lib.rc_dtype_bytes(dtype)

        def own(data: Bytes, rows: Sequence[int]) -> Bytes:
            begin = sum(rows[:me]) * item
            return data[begin : begin + rows[me] * item]

        if name == "all_reduce" and source is not target:
            target[:] = source
        elif name == "all_gather" or (name == "gather" and me == root):
            own(target, lengths.counts)[:] = source
        elif name == "scatter" and me == root:
            target[:] = own(source, lengths.counts)
        elif name == "all_to_all":
            if source is target:
                source = source.copy()
            own(target, lengths.recv_counts or lengths.counts)[:] = own(source, lengths.counts)
        schedule = self._schedule(algorithm, lengths, item, root, skip)
        if self._scratch.size < schedule.scratch:
            self._scratch = np.empty(max(HUGE, schedule.scratch), np.uint8)
        yield from self._run(schedule, [source, target, self._scratch], partial(combine, dtype=dtype, op=op), wait)

    def builtin(self, call: Blockwise, source: Bytes, target: Bytes, op: int, wait: Wait) -> Steps:
        """Run MPI's own collective, on copies: MPI cannot cancel a collective that has begun."""
        given = source.copy()
        result = given if source is target else np.empty_like(target)
        with self._using(given, result):
            self._others.append(builtin.start(self._comm, self._mpi, call, given, result, op))
            yield from wait(self._all_done, range(self.size))
        target[:] = result

    # --- Schedules ----------------------------------------------------------------------------------------------------

    def _schedule(
        self, algorithm: Algorithm, lengths: Lengths, item: int, root: int, skip: frozenset[int]
    ) -> MessageSchedule:
        key = algorithm.title, lengths, item, root, skip
        if key not in self._schedules:
            if len(self._schedules) == CACHED:
                self._schedules.clear()
            schedule = record(algorithm, self.rank, self.size, lengths, root).without(skip)
            steps = [
                MessageStep(NO_PEER, cut(step.source, item), NO_PEER, cut(step.target, item), None)
                if isinstance(step, Copy)
                else MessageStep(
                    step.dest,
                    cut(step.outgoing, item),
                    step.source,
                    cut(step.incoming, item),
                    step.operand and cut(step.operand, item),
                )
                for step in schedule.steps
            ]
            self._schedules[key] = MessageSchedule(steps, schedule.scratch * item)
        return self._schedules[key]

    def _run(self, schedule: MessageSchedule, memory: list[Bytes], reduce: Callable[..., None], wait: Wait) -> Steps:
        isend, irecv, byte = self._comm.Isend, self._comm.Irecv, self._mpi.BYTE
        with self._using(memory):
            for dest, outgoing, source, incoming, operands in schedule.steps:
                if dest == source == NO_PEER:
                    for (m, begin, end), (into, first, last) in zip(outgoing, incoming, strict=True):
                        memory[into][first:last] = memory[m][begin:end]
                    continue
                for m, begin, end in outgoing:
                    self._others.append(isend((memory[m][begin:end], byte), dest))
                    self.sent += end - begin
                if operands is None:
                    for m, begin, end in incoming:
                        self._receives.append(irecv((memory[m][begin:end], byte), source))
                else:
                    targets = [memory[m][begin:end] for m, begin, end in incoming]
                    shares = [memory[m][begin:end] for m, begin, end in operands]
                    yield from self._receive_and_reduce(targets, shares, source, reduce, wait)
                if not self._all_done():
                    yield from wait(self._all_done, (source, dest))

    def _receive_and_reduce(
        self, targets: list[Bytes], operands: list[Bytes], source: int, reduce: Callable[..., None], wait: Wait
    ) -> Steps:
        """Receive segment after segment; reduce one while the next arrive."""
        if targets and not self._landing[0].size:
            buffer = np.empty(WINDOW * CHUNK, np.uint8)
            self._landing = [buffer[begin : begin + CHUNK] for begin in range(0, buffer.size, CHUNK)]
        landing = [self._landing[i % WINDOW][: target.size] for i, target in enumerate(targets)]
        for i, (target, operand) in enumerate(zip(targets, operands, strict=True)):
            for free in landing[i + WINDOW - 1 if i else 0 : i + WINDOW]:
                self._receives.append(self._comm.Irecv((free, self._mpi.BYTE), source))
            if not self._first_received():
                yield from wait(self._first_received, (source,))
            reduce(target, [landing[i], operand] if source < self.rank else [operand, landing[i]])

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _first_received(self) -> bool:
        """Return whether the first receive is done, and remove it."""
        for _ in range(self._spins):
            if self._receives[0].Test():
                self._receives.popleft()
                return True
            if self._oversubscribed:
                os.sched_yield()
        return False

    def _all_done(self) -> bool:
        """Return whether all requests are done."""
        for _ in range(self._spins):
            for requests in (self._receives, self._others):
                while requests and requests[0].Test():
                    requests.popleft()
            if not self._receives and not self._others:
                return True
            if self._oversubscribed:
                os.sched_yield()
        return False

    @contextmanager
    def _using(self, *memory: object) -> Iterator[None]:
        """Lend memory to MPI; if the body fails, cancel its receives as far as MPI can."""
        try:
            with self._mpi_errors():
                yield
        except BaseException:
            self._healthy = False
            for request in self._receives:
                with suppress(self._mpi.Exception):
                    request.Cancel()
            deadline = time.monotonic() + CANCEL
            while not self._receives_ended() and time.monotonic() < deadline:
                time.sleep(PAUSE)
            if self._receives or self._others:
                abandon((memory, self._scratch, self._landing, self._receives, self._others))
            self._scratch, self._landing = NOTHING, [NOTHING]
            self._receives, self._others = deque(), deque()
            raise

    def _receives_ended(self) -> bool:
        """Return whether no request can write to the caller's memory any more."""
        with suppress(self._mpi.Exception):
            while self._receives and self._receives[0].Test():
                self._receives.popleft()
        return not self._receives

    @contextmanager
    def _mpi_errors(self) -> Iterator[None]:
        """Raise MPI's exceptions as RingcommError."""
        try:
            yield
        except self._mpi.Exception as error:
            raise RingcommError(f"MPI: {error}", rank=self.rank) from error
