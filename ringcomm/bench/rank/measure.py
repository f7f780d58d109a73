"""The requests that a rank answers: allocate buffers, time calls, check the results."""

import gc
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time
from typing import Any, NamedTuple

import numpy as np

from .collectives import COLLECTIVES, Array, RankCase, count_wrong, dtype_named, fill
from .library import Library

__all__ = ["RankBench", "describe"]

LINE = 64
MOST_BUFFERS = 1024  # more prepared calls and their arguments would fill the caches themselves
HUGE = 4 << 20  # NumPy requests huge pages from here on, which make copies by the kernel faster

POISON = 0xA5

MOST_CALLS = 64  # between two looks at the time after a start
SETTLED_ROUNDS = 5


class PreparedCall(NamedTuple):
    """A call and its buffers. Without `target` the result replaces the source or a part of it."""

    call: Callable[[], object]
    source: Array
    target: Array | None
    x: Array
    result: Array | None


class RankBench:
    """Each public method is a request, which all ranks get at once; `answer` carries one out."""

    def __init__(self, library: Library, folder: str = "") -> None:
        """`folder` is one that all ranks have, for `start`."""
        self.library, self.buffers = library, library.buffers
        self.stop = Path(folder, "stop")
        self.pools: dict[tuple[Any, ...], Array] = {}

    def answer(self, request: Sequence[Any]) -> tuple[str, Any]:
        """Return "done" and the answer to a request, or "failed" and the reason."""
        if not request:
            return "done", None
        name, *arguments = request
        try:
            return "done", getattr(self, name)(*arguments)
        except Exception as error:  # any error of the library is reported
            return "failed", describe(error)

    def prepare(self, collective: str, options: dict[str, Any]) -> float:
        """Allocate the buffers and prepare the calls of a case; return the seconds of the first call."""
        row = COLLECTIVES[collective]
        library = self.library
        dtype = dtype_named(options["dtype"])
        self.case = RankCase(
            library.rank, library.size, options["count"], dtype, options["op"], options["root"], options["in_place"]
        )
        sends, receives = row.sends(library.size), row.receives(library.size)
        if self.case.in_place and sends != receives:
            sends = receives = library.size  # as in NCCL, the smaller array is this rank's block of the larger
        pool, kind = options["pool"], options["memory"]
        sources = self.arrays("source", sends, pool, kind)
        targets = [None] * len(sources) if self.case.in_place else self.arrays("target", receives, pool, kind)
        self.calls: list[PreparedCall] = []
        for source, target in zip(sources, targets, strict=False):
            x, out = self.arguments(row.sends(library.size), row.receives(library.size), source, target)
            self.fill(x)
            call, result = library.call(collective, self.case, x, out, options["asynchronous"])
            self.calls.append(PreparedCall(call, source, target, x, result))
        # Called first: a library that lacks the operation says so itself, before NumPy fails to compute the result.
        first = self.round(True, 0, 1)
        self.expected = row.expected(self.case)
        return first

    def fill(self, x: Array) -> None:
        values = self.buffers.read(x)
        fill(values, self.case)
        self.buffers.write(x, values)

    def arrays(self, name: str, blocks: int, pool: int, kind: str) -> list[Array]:
        """Return arrays of `blocks` blocks each, side by side in a pool of memory."""
        case = self.case
        shape = (case.count,) if blocks == 1 else (blocks, case.count)
        size = int(np.prod(shape)) * case.dtype.itemsize
        lines = max(1, -(-size // LINE), pool // MOST_BUFFERS // LINE)
        stride = (lines | 1) * LINE  # odd: spreads the arrays over the sets of a cache
        number = max(1, min(MOST_BUFFERS, pool // stride))
        memory = self.memory(name, max(pool, size), kind, size >= HUGE)
        return [memory[i * stride : i * stride + size].view(case.dtype).reshape(shape) for i in range(number)]

    def memory(self, *key: Any) -> Array:
        """Return the memory of this name, size and kind; reuse it until another size or kind is requested."""
        if key not in self.pools:
            name, size, kind, huge = key
            self.pools = {other: array for other, array in self.pools.items() if other[0] != name}
            found = None if kind == "private" else self.library.memory(kind, size)
            self.pools[key] = self.buffers.memory(size, huge) if found is None else found
        return self.pools[key]

    def arguments(self, sends: int, receives: int, source: Array, target: Array | None) -> tuple[Array, Array | None]:
        if target is not None or sends == receives:
            return source, target
        mine = source[self.case.rank]
        return (source, mine) if sends > receives else (mine, source)

    def round(self, rotated: bool, before: int, calls: int) -> float:
        """Return the seconds per call of `calls` calls in a row, after `before` untimed ones."""
        turn = cycle([one.call for one in (self.calls if rotated else self.calls[:1])])
        self.library.barrier()
        for call in islice(turn, before):
            call()
        self.buffers.finish()
        self.library.barrier()
        timed = islice(turn, calls)
        collecting = gc.isenabled()
        gc.disable()
        try:
            start = perf_counter_ns()
            for call in timed:
                call()
            self.buffers.finish()
            return (perf_counter_ns() - start) / 1e9 / calls
        finally:
            if collecting:
                gc.enable()

    def start(self, collective: str, options: dict[str, Any], seconds: float, round_seconds: float) -> list[float]:
        """Call for so many seconds from now on, then in rounds of `round_seconds`, until when all should have settled.

        Return the mean seconds of a call in the first part, the median of the rounds, and the number of wrong elements.
        """
        begin, calls = perf_counter_ns(), 1
        done, spent = 1, self.prepare(collective, options)
        while not self.stop.exists():
            spent += calls * self.round(False, 0, calls)
            done, calls = done + calls, min(2 * calls, MOST_CALLS)
            if self.library.rank == 0 and perf_counter_ns() - begin > 1e9 * seconds:
                self.stop.touch()
            self.library.barrier()  # all ranks stop after the same call
        calls = max(1, round(done * round_seconds / seconds))
        settled = median(self.round(False, 0, calls) for _ in range(SETTLED_ROUNDS))
        return [spent / done, settled, self.check()]

    def check(self) -> int:
        """Call once on the first and on the last buffers, with fresh inputs; return the number of wrong elements."""
        wrong = 0
        for one in self.calls[:1] + self.calls[1:][-1:]:
            for array in (one.source, one.target):
                if array is not None:
                    array.view(np.uint8)[...] = POISON  # results of earlier rounds must not count as new ones
            self.fill(one.x)
            self.library.barrier()
            one.call()
            if one.result is not None:
                wrong += count_wrong(self.buffers.read(one.result), self.expected)
        return wrong

    def cpu(self) -> float:
        """Return the seconds of CPU time, user and system, that all threads of this process have used."""
        return process_time()

    def memcpy(self, size: int) -> float:
        """Return the seconds of a copy of `size` bytes while the other ranks do the same."""
        source, target = self.memory("memcpy", 2 * size, "private", True).reshape(2, size)
        self.buffers.finish()
        self.library.barrier()
        start = perf_counter_ns()
        np.copyto(target, source)  # dispatches to CuPy for its arrays
        self.buffers.finish()
        return (perf_counter_ns() - start) / 1e9

    def close(self) -> None:
        self.calls = []
        self.pools.clear()
        self.library.close()


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
