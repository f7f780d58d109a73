"""mpi4py.futures with MPICommExecutor: one rank submits calls, and the other ranks work."""

import time

from mpi4py.futures import MPICommExecutor, as_completed, wait
from sections import comm, rank, refused, report, section, size


def square(x):
    return x * x


def add(*numbers, start=0):
    return sum(numbers, start)


def fail(text):
    raise ValueError(text)


def of(future):
    """Return the result of a future, or the exception that it has."""
    error = future.exception()
    return f"{type(error).__name__}: {error}" if error else future.result()


def on(root, program, **options):
    """Run a program, a generator of pairs, with the pool on one rank; yield on all ranks what it yields there."""
    with MPICommExecutor(comm, root=root, **options) as pool:
        found = None if pool is None else [*program(pool)]
    yield from comm.bcast(found, root)


@section
def calls():
    def program(pool):
        yield "submit", pool.submit(add, 1, 2, start=10).result()
        yield "map", [*pool.map(square, range(6))]
        yield "map of two", [*pool.map(add, [1, 2], [10, 20])]
        yield "map in chunks", [*pool.map(square, range(10), chunksize=3, timeout=60)]
        yield "map, a few at a time", [*pool.map(square, range(7), buffersize=2)]
        try:
            [*pool.map(time.sleep, [0, 0.3], timeout=0.05)]
        except TimeoutError as error:
            yield "map, too long", str(error)
        yield "map, unordered", sorted(pool.map(square, range(5), unordered=True))
        yield "starmap", [*pool.starmap(add, [(1, 2), (3, 4)], chunksize=2)]
        yield "failed", [of(pool.submit(fail, "on purpose")), of(pool.submit(square, 5))]
        yield "failed map", refused(lambda: [*pool.map(fail, ["text"])])
        yield "num_workers", pool.num_workers == max(size - 1, 1)
        yield "large", len(pool.submit(bytes, 1_000_000).result())

    yield from on(0, program)
    yield "usable", comm.allgather(rank)


@section
def futures():
    def program(pool):
        those, called = [pool.submit(square, n) for n in range(4)], []
        yield "as_completed", sorted(each.result() for each in as_completed(those))
        yield "wait", [len(each) for each in wait(those)]
        yield "states", [(each.done(), each.running(), each.cancelled()) for each in those[:1]]
        those[2].add_done_callback(lambda future: called.append(future.result()))
        yield "callback", called
        pool.shutdown()
        yield "shut down", refused(pool.submit, square, 1)
        try:
            pool.submit(square, 1)
        except RuntimeError as error:
            yield "its text", str(error)

    yield from on(size - 1, program)


def initialize(value):
    square.initialized = value


def initialized(_):
    return square.initialized


@section
def initializers():
    yield from on(
        0, lambda pool: [("initialized", {*pool.map(initialized, range(8))})], initializer=initialize, initargs=(5,)
    )


report()
