"""Elements in memory: what a buffer of a message or collective reads, and where it stores what it receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.buffer import buffer, buffer_of, find_device
from ringcomm.mpi4py.datatypes.layout import Layout
from ringcomm.mpi4py.datatypes.predefined import BY_CHAR, discover

__all__ = ["Blocks", "Buffer", "BufferMemory", "absolute", "covered"]

ndarray = np.ndarray
PAGE = 4096  # the smallest page: the first one has no memory


class BufferMemory:
    """The memory of a buffer, as its bytes in host memory. That of a GPU is copied there and back."""

    __slots__ = ("_bytes", "_device", "_source", "readonly")

    def __init__(self, source: Any, writable: bool = False) -> None:
        self._source, self._device = source, None
        self._bytes: NDArray[np.uint8] | None = None
        if type(source) is ndarray and source.flags.forc:  # whose bytes are looked at only if they are needed
            self.readonly = not source.flags.writeable
            if writable and self.readonly:
                raise BufferError("expected memory that may be written, got an array that is read-only")
        else:
            data = source if type(source) is buffer and not writable else buffer_of(source, writable)
            self._source = data
            self._device, self.readonly = find_device(data), data.readonly
            self._bytes = np.empty(data.nbytes, np.uint8) if self._device else np.asarray(data)

    @property
    def nbytes(self) -> int:
        return int(self._source.nbytes)

    def element_layout(self) -> Layout:
        """Return the layout of an element, from its format; raise KeyError if there is none."""
        if type(self._source) is not ndarray:
            return discover(self._source.element)
        dtype = self._source.dtype
        if dtype.isnative and dtype.char in BY_CHAR:
            return BY_CHAR[dtype.char]
        return discover(memoryview(self._source).format)  # type: ignore[arg-type]  # as in buffer.py

    def reach(self, begin: int, end: int) -> tuple[BufferMemory, int]:
        """Return the memory with these bytes, counted from the first one of this, and where that lies in it.

        A column of a matrix begins at an array of one element, and goes on behind it: its bytes are those of the object
        of which this one is a part. Where that has not got them either, the memory stays this, and a transfer fails.
        """
        if self._device or 0 <= begin <= end <= self.nbytes:
            return self, 0
        whole = _whole(self._source)
        first = _address(self._source) - _address(whole)
        if not 0 <= first + begin <= first + end <= whole.size:
            return self, 0
        reached = BufferMemory(whole)
        reached.readonly = reached.readonly or self.readonly
        return reached, first

    def read(self) -> NDArray[np.uint8]:
        """Return the bytes as they are now."""
        if self._bytes is None:
            self._bytes = self._source.ravel("A").view(np.uint8)
        if self._device and self._bytes.size:
            self._device.download(self._source.address, self._bytes)
        return self._bytes

    def write(self) -> NDArray[np.uint8]:
        """Return the bytes, to be changed; `flush` follows."""
        if self.readonly:
            raise BufferError("expected memory that may be written, got a buffer that is read-only")
        return self.read()

    def flush(self, begin: int = 0, end: int | None = None) -> None:
        """Copy these bytes to the GPU if they belong there, and no others: those may have changed meanwhile."""
        if self._device and self._bytes is not None and (changed := self._bytes[begin:end]).size:
            self._device.upload(changed, self._source.address + begin)


class Buffer:
    """A number of elements of one layout in memory, from an offset in bytes."""

    __slots__ = ("_target", "count", "layout", "memory", "offset")

    def __init__(self, memory: BufferMemory, offset: int, count: int, layout: Layout) -> None:
        self.memory, self.offset, self.count, self.layout = memory, offset, count, layout
        self._target: NDArray[Any] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.count * self.layout.size

    def data(self) -> NDArray[Any]:
        """Return the elements one after the other: a view if they lie so, else a copy."""
        return self.layout.pack(self.memory.read(), self.offset, self.count)

    def target(self) -> NDArray[Any]:
        """Return an array to receive the elements in; `store` follows."""
        memory = self.memory.write()
        if self.layout.contiguous:
            self._target = None
            return self.layout.pack(memory, self.offset, self.count)
        dtype = self.layout.base or np.dtype(np.uint8)
        self._target = np.empty(self.nbytes // dtype.itemsize, dtype)
        return self._target

    def store(self, nbytes: int | None = None) -> None:
        """Store what was received in `target`: all of it, or the first bytes."""
        if self._target is None:
            self.memory.flush(self.offset, self.offset + (self.nbytes if nbytes is None else nbytes))
        else:
            data = self._target.view(np.uint8)[:nbytes]
            self.layout.unpack(data, self.memory.write(), self.offset, self.count)
            self.memory.flush()


class Blocks:
    """One block of elements per rank: numbers of elements, offsets in bytes, and layouts.

    Attributes:
        lengths: The bytes of each block.
    """

    def __init__(self, memory: BufferMemory, counts: list[int], offsets: list[int], layouts: Sequence[Layout]) -> None:
        self.memory, self.counts, self.offsets, self.layouts = memory, counts, offsets, layouts
        self.lengths = [count * each.size for count, each in zip(counts, layouts, strict=True)]
        self._target: NDArray[Any] | None = None
        bases = {each.base for each in layouts}
        self._base: np.dtype[Any] = (bases.pop() if len(bases) == 1 else None) or np.dtype(np.uint8)

    def data(self) -> tuple[NDArray[Any], list[int]]:
        """Return the elements one after the other, and how many items each block has."""
        whole = self._as_one()
        if whole:
            data = whole.data().view(self._base)
        else:
            memory = self.memory.read()
            rows = zip(self.layouts, self.offsets, self.counts, strict=True)
            blocks = [each.pack(memory, at, count).view(np.uint8) for each, at, count in rows if count]
            data = np.concatenate(blocks or [np.empty(0, np.uint8)]).view(self._base)
        return data, [length // self._base.itemsize for length in self.lengths]

    def target(self) -> NDArray[Any]:
        """Return an array to receive the blocks in, one after the other; `store` follows."""
        memory = self.memory.write()
        if whole := self._as_one():
            self._target = None
            return whole.layout.pack(memory, whole.offset, whole.count).view(self._base)
        self._target = np.empty(sum(self.lengths) // self._base.itemsize, self._base)
        return self._target

    def store(self) -> None:
        """Store what was received in `target`."""
        if self._target is None:
            if whole := self._as_one():
                whole.store()
        else:
            memory, data, start = self.memory.write(), self._target.view(np.uint8), 0
            for each, at, count, length in zip(self.layouts, self.offsets, self.counts, self.lengths, strict=True):
                each.unpack(data[start : start + length], memory, at, count)
                start += length
            self.memory.flush()

    def _as_one(self) -> Buffer | None:
        """Return the blocks as one, if they lie one after the other."""
        end = None
        for at, length, count, each in zip(self.offsets, self.lengths, self.counts, self.layouts, strict=True):
            if count and (end not in (None, at) or each is not self.layouts[0] or not each.contiguous):
                return None
            end = at + length if count else end
        first = next((at for at, count in zip(self.offsets, self.counts, strict=True) if count), 0)
        return Buffer(self.memory, first, sum(self.counts), self.layouts[0]) if self.layouts else None


def covered(elements: Sequence[tuple[int, int, Layout]]) -> tuple[int, int]:
    """Return where the data of elements (offset, count, layout) begins and ends; 0, 0 if there is none."""
    spans = [(offset, *layout.span(count)) for offset, count, layout in elements if count and layout.size]
    lows, highs = [at + begin for at, begin, _ in spans], [at + end for at, _, end in spans]
    return min(lows, default=0), max(highs, default=0)


def absolute(elements: Sequence[tuple[int, int, Layout]]) -> tuple[BufferMemory, int]:
    """Return the memory that elements (offset, count, layout) at absolute addresses cover, and its address.

    The addresses are those of host memory, which outlives the transfer: there is no object to keep it alive.
    """
    low, high = covered(elements)
    if low < high and low < PAGE:
        text = f"message: expected addresses of Get_address with BOTTOM, got a datatype or displacement at {low}"
        raise ValueError(text)
    return BufferMemory(buffer.fromaddress(low, high - low)), low


def _whole(source: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of the largest object of which an array, or the memory of an object, is known to be a part."""
    found: Any = source
    while (outer := _outer(found)) is not None:
        try:
            memory = np.asarray(buffer_of(outer))
        except (TypeError, BufferError):  # not contiguous, or no memory at all
            break
        found, source = outer, memory
    return source.ravel("A").view(np.uint8, np.ndarray)


def _outer(obj: Any) -> Any:
    if isinstance(obj, memoryview):
        return obj.obj
    if isinstance(obj, buffer) and obj.obj is not None:
        return obj.obj
    return obj.base if isinstance(obj, np.ndarray) else None


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
