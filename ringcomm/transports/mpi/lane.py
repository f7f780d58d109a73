"""One communicator of MPI and what collectives do on it: agree, and carry out the schedule of an algorithm.

Nothing waits inside MPI. What was started is tested now and then, and in between the caller looks at deadlines,
failures and signals. Messages of one pair and direction arrive in the order in which they were sent, so they carry no
numbers.
"""

import atexit
import logging
import os
import signal
import sys
import threading
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

from ringcomm.algorithms.schedule import NOBODY, Algorithm, Block, Copy, Lengths, record
from ringcomm.errors import CollectiveTimeout, RingcommError
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise, Bytes, Steps
from ringcomm.transports.mpi import handed

__all__ = ["Lane", "Wait", "abandon", "combine", "within"]

log = logging.getLogger("ringcomm")

# Wait until this is so; the ranks of the lane that keep it from being so.
Wait = Callable[[Callable[[], bool], Sequence[int]], Steps]
T = TypeVar("T")
Numbers = NDArray[np.int64]

CHUNK = 1 << 20  # bytes of a message: one is combined while the next arrive
WINDOW = 8  # messages that may arrive: with fewer the TCP of Open MPI leaves a third of a link unused
PLANS = 256  # kept for calls that come again
CANCEL = 1.0  # seconds in which a receive that has begun to arrive must be through, after a failure
PAUSE = 1e-3
GRACE = 2.0  # seconds that the others have to deal with a failure, before one that has ended ends the job
ABORT = 5  # seconds that MPI_Abort may take, before the process ends without it
SPINS = 1000  # tests before a wait lets others go on
SPINS_CROWDED = 30  # where ranks share cores, which a test gives away
HUGE = 4 << 20  # NumPy asks for huge pages for arrays of this size: the kernel copies those several times as fast


def combine(target: Bytes, sources: list[Bytes], dtype: int, op: int, factor: float = 1.0) -> None:
    """Reduce the sources in their order into `target`, which may be one of them."""
    pointers = ffi.new("void *[]", [ffi.from_buffer(each) for each in sources])
    count = target.size // lib.rc_dtype_bytes(dtype)
    check(lib.rc_reduce(ffi.from_buffer(target), pointers, len(sources), count, dtype, op, factor))


Piece = tuple[int, int, int]  # a memory of the call, and the bytes of it


class Piecewise(NamedTuple):
    """A step of a schedule in messages; without a peer it is a copy."""

    dest: int
    outgoing: list[Piece]
    source: int
    incoming: list[Piece]
    operands: list[Piece] | None


class Plan(NamedTuple):
    """A schedule, ready to be carried out."""

    steps: list[Piecewise]
    scratch: int  # bytes


def cut(block: Block, item: int) -> list[Piece]:
    begin, end = block.begin * item, block.end * item
    return [(block.memory, first, min(first + CHUNK, end)) for first in range(begin, end, CHUNK)]


_abandoned: list[object] = []  # what MPI may still use after a failure, or other ranks are in the middle of
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandoned.clear)


def abandon(what: object) -> None:
    """Keep for ever what MPI may use, and end the job at exit."""
    _abandoned.append(what)


@atexit.register
def _abort_if_something_is_under_way() -> None:
    """End the job, for MPI_Finalize would wait for what a failure has left under way, perhaps for ever."""
    if _abandoned:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        time.sleep(GRACE)
        log.warning("MPI_Abort: something is under way that will not end, and MPI_Finalize might not return")
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ABORT)  # MPI_Abort itself may wait for a host that cannot be reached
        MPI.COMM_WORLD.Abort(1)


def within(timeout: float, words: str, call: Callable[[], T]) -> T:
    """Return what `call()` returns, which waits inside MPI; raise CollectiveTimeout where that takes too long.

    Below MPI_THREAD_MULTIPLE there is no thread that could look at the clock meanwhile.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call()
    ended = Future[T]()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="ringcomm MPI", daemon=True)
    thread.start()
    try:
        return ended.result(timeout)
    except FutureTimeout:
        abandon(thread)
        raise CollectiveTimeout(f"{words} took more than {timeout:g} s: a rank has not come, or is lost") from None
    except BaseException:
        if not ended.done():  # it was interrupted
            abandon(thread)
        raise


class Lane:
    """This rank's end of a communicator of MPI that nobody else uses."""

    def __init__(self, comm: Any, crowded: bool) -> None:
        from mpi4py import MPI

        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent = 0  # bytes of the data of collectives
        self._comm, self._mpi, self._crowded = comm, MPI, crowded
        self._spins = SPINS_CROWDED if crowded else SPINS
        self._landing = [np.empty(0, np.uint8)]  # where comes what is to be combined
        self._scratch = np.empty(0, np.uint8)
        self._plans: dict[object, Plan] = {}
        self._receives: deque[Any] = deque()  # what is under way
        self._others: deque[Any] = deque()
        self._healthy = True

    def split(self, color: int | None, key: int, timeout: float) -> "Lane | None":
        """Make a lane of the ranks with the same color."""
        number = self._mpi.UNDEFINED if color is None else color
        with self._named():
            comm = within(timeout, "MPI_Comm_split", lambda: self._comm.Split(number, key))
        return None if color is None else Lane(comm, self._crowded)

    def free(self) -> None:
        """Give the communicator back to MPI, unless a failure has left something under way: that would wait for it."""
        if self._healthy:
            with self._named():
                self._comm.Free()

    # --- What all ranks of the lane call ------------------------------------------------------------------------------

    def most(self, numbers: Numbers, wait: Wait) -> Generator[None, None, Numbers]:
        """Return the greatest numbers of all ranks, element by element, when all have come."""
        result = np.empty_like(numbers)
        with self._using(numbers, result):
            self._others.append(self._comm.Iallreduce(numbers, result, self._mpi.MAX))
            if not self._through():
                yield from wait(self._through, range(self.size))
        return result

    def rows(self, numbers: Numbers, wait: Wait) -> Generator[None, None, Numbers]:
        """Return the numbers of all ranks, a row for each."""
        result = np.empty((self.size, numbers.size), np.int64)
        with self._using(numbers, result):
            self._others.append(self._comm.Iallgather(numbers, result))
            if not self._through():
                yield from wait(self._through, range(self.size))
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
        near: frozenset[int] = frozenset(),
    ) -> Steps:
        """Do the collective of this algorithm. `source` and `target` are the same array where the result replaces x.

        What stays on this rank is copied first, as `record` has it. With the ranks `near` nothing is exchanged.
        """
        name, me = algorithm.collective, self.rank
        item = lib.rc_dtype_bytes(dtype)

        def own(data: Bytes, rows: Sequence[int]) -> Bytes:
            begin = sum(rows[:me]) * item
            return data[begin : begin + rows[me] * item]

        if name == "all_reduce" and source is not target:
            target[:] = source
        elif name == "all_gather" or (name == "gather" and me == root):
            own(target, lengths.rows)[:] = source
        elif name == "scatter" and me == root:
            target[:] = own(source, lengths.rows)
        elif name == "all_to_all":
            if source is target:
                source = source.copy()
            own(target, lengths.come or lengths.rows)[:] = own(source, lengths.rows)
        plan = self._plan(algorithm, lengths, item, root, near)
        if self._scratch.size < plan.scratch:
            self._scratch = np.empty(max(HUGE, plan.scratch), np.uint8)
        yield from self._carry_out(plan, [source, target, self._scratch], partial(combine, dtype=dtype, op=op), wait)

    def handed(self, call: Blockwise, source: Bytes, target: Bytes, op: int, wait: Wait) -> Steps:
        """Let MPI do a collective: on memory of ours, for nothing can take it back once it has begun."""
        given = source.copy()
        result = given if source is target else np.empty_like(target)
        with self._using(given, result):
            self._others.append(handed.start(self._comm, self._mpi, call, given, result, op))
            yield from wait(self._through, range(self.size))
        target[:] = result

    # --- Schedules ----------------------------------------------------------------------------------------------------

    def _plan(self, algorithm: Algorithm, lengths: Lengths, item: int, root: int, near: frozenset[int]) -> "Plan":
        key = algorithm.title, lengths, item, root, near
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            schedule = record(algorithm, self.rank, self.size, lengths, root).without(near)
            steps = [
                Piecewise(NOBODY, cut(step.source, item), NOBODY, cut(step.target, item), None)
                if isinstance(step, Copy)
                else Piecewise(
                    step.dest,
                    cut(step.outgoing, item),
                    step.source,
                    cut(step.incoming, item),
                    step.operand and cut(step.operand, item),
                )
                for step in schedule.steps
            ]
            self._plans[key] = Plan(steps, schedule.scratch * item)
        return self._plans[key]

    def _carry_out(self, plan: "Plan", memory: list[Bytes], work: Callable[..., None], wait: Wait) -> Steps:
        isend, irecv, byte = self._comm.Isend, self._comm.Irecv, self._mpi.BYTE
        with self._using(memory):
            for dest, outgoing, source, incoming, operands in plan.steps:
                if dest == source == NOBODY:
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
                    yield from self._combine(targets, shares, source, work, wait)
                if not self._through():
                    yield from wait(self._through, (source, dest))

    def _combine(
        self, targets: list[Bytes], operands: list[Bytes], source: int, work: Callable[..., None], wait: Wait
    ) -> Steps:
        """Receive piece after piece; one is combined while the next arrives."""
        if targets and not self._landing[0].size:
            room = np.empty(WINDOW * CHUNK, np.uint8)
            self._landing = [room[begin : begin + CHUNK] for begin in range(0, room.size, CHUNK)]
        landing = [self._landing[i % WINDOW][: target.size] for i, target in enumerate(targets)]
        for i, (target, operand) in enumerate(zip(targets, operands, strict=True)):
            for free in landing[i + WINDOW - 1 if i else 0 : i + WINDOW]:
                self._receives.append(self._comm.Irecv((free, self._mpi.BYTE), source))
            if not self._one_has_come():
                yield from wait(self._one_has_come, (source,))
            work(target, [landing[i], operand] if source < self.rank else [operand, landing[i]])

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _one_has_come(self) -> bool:
        """Say whether the first receive is through, and forget it."""
        for _ in range(self._spins):
            if self._receives[0].Test():
                self._receives.popleft()
                return True
            if self._crowded:
                os.sched_yield()
        return False

    def _through(self) -> bool:
        """Say whether everything that was started is through."""
        for _ in range(self._spins):
            for requests in (self._receives, self._others):
                while requests and requests[0].Test():
                    requests.popleft()
            if not self._receives and not self._others:
                return True
            if self._crowded:
                os.sched_yield()
        return False

    @contextmanager
    def _using(self, *memory: object) -> Iterator[None]:
        """Let MPI use memory; where the body fails, stop that as far as it can be stopped."""
        try:
            with self._named():
                yield
        except BaseException:
            self._healthy = False
            for request in self._receives:
                with suppress(self._mpi.Exception):
                    request.Cancel()
            deadline = time.monotonic() + CANCEL
            while not self._ended() and time.monotonic() < deadline:
                time.sleep(PAUSE)
            if self._receives or self._others:
                abandon((memory, self._scratch, self._landing, self._receives, self._others))
            self._scratch = np.empty(0, np.uint8)
            self._landing = [self._scratch]
            self._receives, self._others = deque(), deque()
            raise

    def _ended(self) -> bool:
        """Say whether nothing is under way that could write to memory of the caller."""
        with suppress(self._mpi.Exception):
            while self._receives and self._receives[0].Test():
                self._receives.popleft()
        return not self._receives

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise what MPI raises as an error of ringcomm."""
        try:
            yield
        except self._mpi.Exception as error:
            raise RingcommError(f"MPI: {error}", rank=self.rank) from error
