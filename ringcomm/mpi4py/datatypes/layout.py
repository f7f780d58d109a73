"""Layouts: where the data of a datatype lies in memory, and how to copy it out and in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.constants import UNDEFINED
from ringcomm.mpi4py.base.errors import ERR_BUFFER, failure

__all__ = ["Layout", "LayoutBlocks", "basic", "bounded", "combined", "pair"]

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


class LayoutBlocks(NamedTuple):
    """Blocks of consecutive elements of one layout, at offsets in bytes."""

    layout: Layout
    offsets: Offsets
    lengths: Offsets  # in elements


class Layout:
    """A type map: blocks of other layouts, or one basic element.

    Attributes:
        base: The dtype of the packed elements; None if they are of several. `size` is a multiple of its item size.
        size: Bytes of data.
        lb, extent: Where an element begins, and the distance to the next one, in bytes.
        true_lb, true_extent: The same, of the data alone.
        align: The alignment of a structure that has this element.
    """

    def __init__(
        self,
        base: Any,
        size: int,
        bounds: tuple[int, int],
        true: tuple[int, int],
        align: int,
        blocks: Sequence[LayoutBlocks],
    ) -> None:
        self.base: np.dtype[Any] | None = base
        self.size, self.align, self.blocks = size, align, blocks
        self.lb, self.extent = bounds[0], bounds[1] - bounds[0]
        self.true_lb, self.true_extent = true[0], true[1] - true[0]
        # How it was made, as constructors.py records; and the name and the attributes that the program may set.
        self.combiner, self.parameters, self.parts = "NAMED", dict[str, Any](), list[Layout]()
        self.code, self.name = "", ""
        self.attributes: dict[int, Any] = {}

    @cached_property
    def runs(self) -> tuple[Offsets, Offsets]:
        """The offsets and lengths in bytes of the pieces of memory without gaps, in the order of the type map."""
        if not self.blocks:
            return np.array([self.true_lb]), np.array([self.size])
        pieces = [_pieces(*block) for block in self.blocks]
        offsets, lengths = (np.concatenate(each) for each in zip(*pieces, strict=True))
        offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
        begins = np.r_[True, offsets[1:] != offsets[:-1] + lengths[:-1]][: len(offsets)]
        ends = np.cumsum(lengths)[np.r_[begins[1:], True][: len(offsets)]]
        return offsets[begins], np.diff(ends, prepend=0)

    @cached_property
    def contiguous(self) -> bool:
        """Whether elements follow each other without gaps."""
        return self.size == self.extent and len(self.runs[0]) <= 1

    @cached_property
    def basics(self) -> NDArray[np.int64]:
        """The sizes of the basic elements, in the order of the type map."""
        if not self.blocks:
            return np.array([self.size])
        return np.concatenate([np.tile(part.basics, lengths.sum()) for part, _, lengths in self.blocks])

    def count_basics(self, nbytes: int) -> int:
        """Return how many basic elements bytes of data are, UNDEFINED if there is a part of one."""
        if self.base is not None and not self.base.names:
            return UNDEFINED if nbytes % self.base.itemsize else nbytes // self.base.itemsize
        whole, rest = divmod(nbytes, self.size)
        ends = np.cumsum(self.basics)
        part = int(np.searchsorted(ends, rest, "right"))
        return UNDEFINED if rest and rest not in ends else whole * len(ends) + part

    def size_of_basics(self, count: int) -> int:
        """Return the bytes of a number of basic elements."""
        if self.base is not None and not self.base.names:
            return count * self.base.itemsize
        whole, rest = divmod(count, max(len(self.basics), 1))
        return whole * self.size + int(self.basics[:rest].sum())

    @cached_property
    def _unit(self) -> int:
        """The bytes that a copy can move at once."""
        offsets, lengths = self.runs
        return int(np.gcd.reduce([8, self.extent, *np.unique(offsets), *np.unique(lengths)]))

    @cached_property
    def _index(self) -> Offsets:
        """The offsets of all units of an element, in units."""
        offsets, lengths = self.runs[0] // self._unit, self.runs[1] // self._unit
        return np.repeat(offsets - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())

    @cached_property
    def _step(self) -> int | None:
        """The distance of the runs in bytes, if they are of one length and at one distance."""
        offsets, lengths = self.runs
        steps = np.unique(np.diff(offsets))
        return None if len(steps) > 1 or len(np.unique(lengths)) > 1 else int(steps[0]) if len(steps) else self.extent

    def span(self, count: int) -> tuple[int, int]:
        """Return where the data of `count` elements begins and ends, in bytes from the address of the first one."""
        if not count * self.size:
            return 0, 0
        last = (count - 1) * self.extent
        return self.true_lb + min(last, 0), self.true_lb + self.true_extent + max(last, 0)

    def pack(self, memory: Bytes, offset: int, count: int) -> NDArray[Any]:
        """Return the elements at an offset, one after the other: a view of the memory if they lie so."""
        self._check(memory, offset, count)
        if self.contiguous:
            start = offset + self.true_lb
            data = memory[start : start + count * self.size]
        elif self._step is not None:
            data = self._grid(memory, offset, count).copy().reshape(-1)
        else:
            units, index = self._scattered(memory, offset, count)
            data = units[index]
        return data.view(np.uint8 if self.base is None else self.base)

    def unpack(self, data: NDArray[Any], memory: Bytes, offset: int, count: int) -> None:
        """Store elements that lie one after the other. There may be fewer than `count`, and a part of one."""
        self._check(memory, offset, count)
        data = data.view(np.uint8)[: count * self.size]
        if self.contiguous:
            start = offset + self.true_lb
            memory[start : start + data.size] = data
        elif data.size == count * self.size and self._step is not None:
            grid = self._grid(memory, offset, count)
            grid[...] = data.view(grid.dtype).reshape(grid.shape)
        elif data.size:
            units, index = self._scattered(memory, offset, count)
            units[index[: data.size // self._unit]] = data[: data.size // self._unit * self._unit].view(units.dtype)

    def _check(self, memory: Bytes, offset: int, count: int) -> None:
        """Raise ERR_BUFFER unless the elements lie inside of the memory."""
        begin, end = self.span(count)
        if begin < end and not 0 <= offset + begin <= offset + end <= memory.size:
            text = f"{count} elements need the bytes {offset + begin} to {offset + end} of a buffer of {memory.size}"
            raise failure(ERR_BUFFER, text)

    def _grid(self, memory: Bytes, offset: int, count: int) -> NDArray[Any]:
        """Return a view of the elements whose last axis is a run."""
        offsets, lengths = self.runs
        shape = count, len(offsets), int(lengths[0]) // self._unit
        if not count:
            return np.empty(shape, f"u{self._unit}")
        strides = self.extent, self._step, self._unit
        return np.ndarray(shape, f"u{self._unit}", memory, offset + int(offsets[0]), strides)  # type: ignore[arg-type]  # NumPy takes any writable buffer

    def _scattered(self, memory: Bytes, offset: int, count: int) -> tuple[NDArray[Any], Offsets]:
        """Return the memory in units, and the index of those that the elements have."""
        first = offset % self._unit
        units = memory[first : memory.size - (memory.size - first) % self._unit].view(f"u{self._unit}")
        starts = np.arange(count)[:, None] * (self.extent // self._unit) + offset // self._unit
        return units, (starts + self._index).reshape(-1)


def basic(dtype: Any) -> Layout:
    """Return the layout of a basic element."""
    dtype = np.dtype(dtype)
    bounds = 0, dtype.itemsize
    return Layout(dtype, dtype.itemsize, bounds, bounds, dtype.alignment, ())


def combined(blocks: Sequence[tuple[Layout, Any, Any]], padded: bool = False) -> Layout:
    """Return the layout of blocks (layout, offsets in bytes, lengths in elements); padded, as C pads a structure."""
    given = [
        LayoutBlocks(part, np.asarray(at, np.int64), np.asarray(lengths, np.int64)) for part, at, lengths in blocks
    ]
    given = [
        LayoutBlocks(part, at[lengths > 0], lengths[lengths > 0]) for part, at, lengths in given if np.any(lengths > 0)
    ]
    bases = {part.base for part, *_ in given}
    base = bases.pop() if len(bases) == 1 else None
    size = sum(part.size * int(lengths.sum()) for part, _, lengths in given)
    align = max((part.align for part, *_ in given), default=1)
    low, high = _bounds([(*block, block.layout.lb, block.layout.extent) for block in given])
    true = _bounds([(*block, block.layout.true_lb, block.layout.true_extent) for block in given if block.layout.size])
    if padded:
        high = low + -(-(high - low) // align) * align
    return Layout(base, size, (low, high), true, align, given)


def pair(value: Layout, index: Layout) -> Layout:
    """Return the layout of a value and an index, with the fields `value` and `index`."""
    at = -(-value.size // index.align) * index.align
    layout = combined([(value, [0], [1]), (index, [at], [1])], padded=True)
    layout.base = np.dtype([("value", value.base), ("index", index.base)])
    return layout


def bounded(layout: Layout, lb: int, extent: int) -> Layout:
    """Return a layout with other bounds. It does not pad a structure that has it."""
    true = layout.true_lb, layout.true_lb + layout.true_extent
    blocks = [LayoutBlocks(layout, np.zeros(1, np.int64), np.ones(1, np.int64))] if layout.size else ()
    return Layout(layout.base, layout.size, (lb, lb + extent), true, 1, blocks)


def _bounds(blocks: Sequence[tuple[Layout, Offsets, Offsets, int, int]]) -> tuple[int, int]:
    """Return where blocks of elements with these bounds (lb, extent) begin and end."""
    lows, highs = [], []
    for layout, offsets, lengths, lb, extent in blocks:
        last = (lengths - 1) * layout.extent
        lows.append(int((offsets + np.minimum(last, 0)).min()) + lb)
        highs.append(int((offsets + np.maximum(last, 0)).max()) + lb + extent)
    return min(lows, default=0), max(highs, default=0)


def _pieces(layout: Layout, offsets: Offsets, lengths: Offsets) -> tuple[Offsets, Offsets]:
    """Return the runs of blocks, adjacent ones not yet merged."""
    if layout.contiguous:
        return offsets + layout.true_lb, lengths * layout.size
    starts = np.repeat(offsets - layout.extent * (np.cumsum(lengths) - lengths), lengths)
    starts += layout.extent * np.arange(lengths.sum())
    at, sizes = layout.runs
    return (starts[:, None] + at).reshape(-1), np.tile(sizes, len(starts))
