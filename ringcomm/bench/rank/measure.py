"""What a rank does for the bench: buffers, calls in a row against the clock, and the check of what came out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import cycle, islice
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from .collectives import COLLECTIVES, Array, Setting, count_wrong, dtype_named, fill
from .library import Library

__all__ = ["Bench"]

LINE = 64
MOST_SLOTS = 1024  # the calls on them, and their arguments, must not fill the caches themselves

HUGE = 4 << 20  # from here on NumPy asks for huge pages, which make a difference to whoever lets the kernel copy

POISON = 0xA5


class Slot(NamedTuple):
    """A call, and the memory that it is about: without `target` the result replaces the source, or a part of it."""

    call: Callable[[], object]
    source: Array
    target: Array | None
    x: Array
    result: Array | None


class Bench:
    """The requests: each method is one, and is asked of all ranks at once."""

    def __init__(self, library: Library) -> None:
        self.library, self.buffers = library, library.buffers
        self.pools: dict[tuple[Any, ...], Array] = {}

    def prepare(self, collective: str, options: dict[str, Any]) -> float:
        """Make buffers and calls for a size; return the seconds of the first call."""
        row = COLLECTIVES[collective]
        library = self.library
        dtype = dtype_named(options["dtype"])
        self.setting = Setting(
            library.rank, library.size, options["count"], dtype, options["op"], options["root"], options["in_place"]
        )
        sends, receives = row.sends(library.size), row.receives(library.size)
        if self.setting.in_place and sends != receives:
            sends = receives = library.size  # as NCCL defines in place: the smaller is this rank's block of the larger
        pool, symmetric = options["pool"], options["symmetric"]
        sources = self.arrays("source", sends, pool, symmetric)
        targets = [None] * len(sources) if self.setting.in_place else self.arrays("target", receives, pool, symmetric)
        self.slots: list[Slot] = []
        for source, target in zip(sources, targets, strict=False):
            x, out = self.arguments(row.sends(library.size), row.receives(library.size), source, target)
            self.fill(x)
            call, result = library.call(collective, self.setting, x, out, options["asynchronous"])
            self.slots.append(Slot(call, source, target, x, result))
        self.expected = row.expected(self.setting)
        return self.round(True, 0, 1)

    def fill(self, x: Array) -> None:
        values = self.buffers.read(x)
        fill(values, self.setting)
        self.buffers.write(x, values)

    def arrays(self, name: str, blocks: int, pool: int, symmetric: bool) -> list[Array]:
        """Return arrays of so many blocks, one after the other in a pool of memory."""
        setting = self.setting
        shape = (setting.count,) if blocks == 1 else (blocks, setting.count)
        size = int(np.prod(shape)) * setting.dtype.itemsize
        lines = max(1, -(-size // LINE), pool // MOST_SLOTS // LINE)
        stride = (lines | 1) * LINE  # odd: the slots must not all fall into the same sets of a cache
        number = max(1, min(MOST_SLOTS, pool // stride))
        memory = self.memory(name, max(pool, size), symmetric, size >= HUGE)
        return [memory[i * stride : i * stride + size].view(setting.dtype).reshape(shape) for i in range(number)]

    def memory(self, *key: Any) -> Array:
        """Return the memory of that name, as large and of that kind; it is kept until another kind is asked for."""
        if key not in self.pools:
            name, size, symmetric, huge = key
            self.pools = {other: array for other, array in self.pools.items() if other[0] != name}
            found = self.library.symmetric(size) if symmetric else None
            self.pools[key] = self.buffers.memory(size, huge) if found is None else found
        return self.pools[key]

    def arguments(self, sends: int, receives: int, source: Array, target: Array | None) -> tuple[Array, Array | None]:
        if target is not None or sends == receives:
            return source, target
        mine = source[self.setting.rank]
        return (source, mine) if sends > receives else (mine, source)

    def round(self, rotated: bool, before: int, calls: int) -> float:
        """Return the seconds per call of so many in a row, after some that are not counted."""
        turn = cycle([slot.call for slot in (self.slots if rotated else self.slots[:1])])
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

    def check(self) -> int:
        """Call once on the first and on the last buffers, with fresh inputs; return how many elements are wrong."""
        wrong = 0
        for slot in self.slots[:1] + self.slots[1:][-1:]:
            for array in (slot.source, slot.target):
                if array is not None:
                    array.view(np.uint8)[...] = POISON  # results of earlier rounds must not pass for new ones
            self.fill(slot.x)
            self.library.barrier()
            slot.call()
            if slot.result is not None:
                wrong += count_wrong(self.buffers.read(slot.result), self.expected)
        return wrong

    def prepare_memcpy(self, size: int) -> None:
        self.memory("memcpy", 2 * size, False, True)

    def memcpy(self, size: int) -> float:
        """Return the seconds that copying `size` bytes takes while the other ranks do the same."""
        source, target = self.memory("memcpy", 2 * size, False, True).reshape(2, size)
        self.buffers.finish()
        self.library.barrier()
        start = perf_counter_ns()
        np.copyto(target, source)  # CuPy's arrays make it theirs
        self.buffers.finish()
        return (perf_counter_ns() - start) / 1e9

    def close(self) -> None:
        self.slots = []
        self.pools.clear()
        self.library.close()
