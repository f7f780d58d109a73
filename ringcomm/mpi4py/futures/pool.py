"""The executors: they submit calls to other ranks, to processes or to threads, whichever there are."""

import functools
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Self

from ringcomm.machine import topology
from ringcomm.mpi4py import MPI
from ringcomm.mpi4py.futures.manager import PoolClient, PoolManager
from ringcomm.mpi4py.futures.preparation import Preparation
from ringcomm.mpi4py.futures.worker import serve

__all__ = [
    "MPICommExecutor",
    "MPIPoolExecutor",
    "ProcessPoolExecutor",
    "ThreadPoolExecutor",
    "get_comm_workers",
    "shared",
]

SPAWN_OPTIONS = {"backoff", "mpi_info", "python_args", "python_exe", "use_pkl5"}  # of mpi4py, about its processes

Backend = tuple[int, Executor]  # the number of workers, and what submits calls to them
Start = Callable[[Preparation, bool], Backend]  # bool: whether workers import the main module
_shared: Start | None = None  # under `python -m mpi4py.futures`


class MPIPoolExecutor(Executor):
    """Runs calls on the other ranks, under `python -m mpi4py.futures`; in a world of one rank, in new processes.

    Args:
        max_workers: The number of new processes; default: one per core. Other ranks are always all workers.
        initializer: A function that each worker calls, with the arguments `initargs`, before its first call.
        main: Whether workers import the main module of the program.
        path: Folders to append to sys.path in the workers.
        wdir: The folder to change to there.
        env: Environment variables to set there.
        ignored: The options of mpi4py for the processes that it spawns.

    Raises:
        NotImplementedError: There are other ranks, but they run this program too.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        *,
        main: bool = True,
        path: Iterable[str] = (),
        wdir: str | None = None,
        env: Mapping[str, str] | None = None,
        **ignored: object,
    ) -> None:
        if max_workers is not None and int(max_workers) <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if unknown := ignored.keys() - SPAWN_OPTIONS:
            raise NotImplementedError(
                f"MPIPoolExecutor({min(unknown)}=…): ringcomm has no such option; use initializer"
            )
        preparation = Preparation(tuple(path), wdir, dict(env or {}), initializer, tuple(initargs))
        self._workers, self._backend = self._start(max_workers and int(max_workers), preparation, main)
        self._closed = False

    def _start(self, processes: int | None, preparation: Preparation, main: bool) -> Backend:
        if _shared:
            return _shared(preparation, main)
        if (size := MPI.COMM_WORLD.Get_size()) > 1:
            raise NotImplementedError(
                f"MPIPoolExecutor in a world of {size} ranks that all run this program: ringcomm spawns no processes. "
                "Run it with `-m mpi4py.futures`, which makes all ranks but 0 workers, or use MPICommExecutor"
            )
        return _processes(processes, preparation)

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 after shutdown and in a broken executor."""
        return 0 if self._closed else self._workers

    _max_workers = num_workers  # as in the executors of concurrent.futures, where others read it

    def bootup(self, wait: bool = True) -> Self:  # noqa: ARG002 (as mpi4py's)
        """Return this executor: its workers are there, or start with their first call."""
        if self._closed:
            raise RuntimeError("cannot bootup after shutdown")
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of `fn(*args, **kwargs)` on a worker."""
        if self._closed:
            raise RuntimeError("cannot submit after shutdown")
        try:
            return self._backend.submit(fn, *args, **kwargs)
        except BrokenExecutor:
            self._workers = 0
            raise

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `map(fn, *iterables)`: see starmap."""
        return self.starmap(fn, zip(*iterables, strict=False), timeout, chunksize, buffersize, unordered)

    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `fn(*args)` for all `args` of an iterable.

        Args:
            fn: The function.
            iterable: The arguments of each call.
            timeout: Seconds for all results; then the iterator raises TimeoutError.
            chunksize: How many calls a worker gets at a time.
            buffersize: How many chunks are submitted in advance; default: all.
            unordered: Whether to yield results as they come.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and (buffersize < 1 or unordered):
            raise ValueError("buffersize must be None or > 0, and None if unordered")
        if chunksize > 1:
            each, chunks = functools.partial(_call_each, fn), _chunks(iterable, chunksize)
            return itertools.chain.from_iterable(self.starmap(each, chunks, timeout, 1, buffersize, unordered))
        end = None if timeout is None else time.monotonic() + timeout
        arguments = iter(iterable)
        submitted = deque(self.submit(fn, *each) for each in itertools.islice(arguments, buffersize))

        def left() -> float | None:
            return None if end is None else end - time.monotonic()

        def results() -> Iterator[Any]:
            try:
                if unordered:
                    for future in as_completed(submitted, left()):
                        yield future.result()
                while submitted and not unordered:
                    result = submitted[0].result(left())
                    submitted.popleft()
                    submitted.extend(self.submit(fn, *each) for each in itertools.islice(arguments, buffersize and 1))
                    yield result
            finally:
                for future in submitted:
                    future.cancel()

        return results()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls; wait for the submitted ones, or cancel those not begun."""
        self._closed = True
        self._backend.shutdown(wait, cancel_futures=cancel_futures)


class ThreadPoolExecutor(MPIPoolExecutor):
    """The same with threads of this process, one unless `max_workers` is given."""

    def _start(self, processes: int | None, preparation: Preparation, main: bool) -> Backend:  # noqa: ARG002 (each kind of pool takes what it needs)
        return _threads(processes or 1, preparation)


class ProcessPoolExecutor(MPIPoolExecutor):
    """The same with new processes, whatever the world."""

    def _start(self, processes: int | None, preparation: Preparation, main: bool) -> Backend:  # noqa: ARG002 (each kind of pool takes what it needs)
        return _processes(processes, preparation)


class MPICommExecutor:
    """In a `with` statement, gives the root of a communicator an MPIPoolExecutor whose workers are the other ranks.

    These get None, when the root has left the block.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, root: int = 0, **options: Any) -> None:
        self._comm = MPI.COMM_WORLD if comm is None else comm
        if self._comm.Is_inter():
            raise ValueError("comm: expected an intracommunicator")
        if not 0 <= root < self._comm.Get_size():
            raise ValueError(f"root: expected a rank from 0 to {self._comm.Get_size() - 1}, got {root}")
        self._root, self._options = root, options
        self._stack = ExitStack()
        self._executor: MPIPoolExecutor | None = None

    def __enter__(self) -> MPIPoolExecutor | None:
        if self._executor is not None:
            raise RuntimeError("this MPICommExecutor has been entered")
        start = _shared or self._stack.enter_context(managed(self._comm, self._root))
        if start:
            self._executor = self._stack.enter_context(_CommPoolExecutor(start, **self._options))
        return self._executor

    def __exit__(self, *error: Any) -> bool:
        is_root, self._executor = self._executor is not None, None
        self._stack.__exit__(*error)
        return not is_root  # what a worker does with None is no error


class _CommPoolExecutor(MPIPoolExecutor):
    def __init__(self, start: Start, **options: Any) -> None:
        self._begin = start
        super().__init__(**options)

    def _start(self, processes: int | None, preparation: Preparation, main: bool) -> Backend:  # noqa: ARG002 (each kind of pool takes what it needs)
        return self._begin(preparation, main)


@contextmanager
def managed(comm: MPI.Intracomm, root: int) -> Iterator[Start | None]:
    """Make all ranks but the root workers until the root leaves the block; then they enter it, with None."""
    if comm.Get_size() == 1:
        yield lambda preparation, _: _threads(1, preparation)
        return
    copy = comm.Dup()
    if comm.Get_rank() != root:
        serve(copy, root)
        yield None
    else:
        manager = PoolManager(copy)
        try:
            yield lambda preparation, main: (manager.workers, PoolClient(manager, preparation, main))
        finally:
            manager.stop()
    copy.Free()


@contextmanager
def shared() -> Iterator[bool]:
    """Make all ranks but 0 workers of every MPIPoolExecutor in the block. Yields whether this rank is 0."""
    global _shared
    with managed(MPI.COMM_WORLD, 0) as _shared:
        try:
            yield _shared is not None
        finally:
            _shared = None


def get_comm_workers() -> NoReturn:
    """Raise NotImplementedError: a communicator of the workers has to be made by all ranks, before the pool."""
    raise NotImplementedError("mpi4py.futures.get_comm_workers: make a communicator with MPI.COMM_WORLD.Split instead")


def _processes(count: int | None, preparation: Preparation) -> Backend:
    count = count or len(topology.cores())
    context = multiprocessing.get_context("spawn")
    return count, futures.ProcessPoolExecutor(count, context, preparation)


def _threads(count: int, preparation: Preparation) -> Backend:
    return count, futures.ThreadPoolExecutor(count, "mpi4py.futures", preparation)


def _call_each(fn: Callable[..., Any], chunk: Iterable[Iterable[Any]]) -> list[Any]:
    return [fn(*arguments) for arguments in chunk]


def _chunks(iterable: Iterable[Iterable[Any]], size: int) -> Iterator[tuple[list[Iterable[Any]]]]:
    arguments = iter(iterable)
    while chunk := list(itertools.islice(arguments, size)):
        yield (chunk,)
