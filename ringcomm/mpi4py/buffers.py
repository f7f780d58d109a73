"""Specifications of buffers: an array, or a list of it with counts, displacements and datatypes."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.constants import BOTTOM
from ringcomm.mpi4py.datatype import BY_CHAR, Datatype, discover, find_type
from ringcomm.mpi4py.memory import buffer, expose, find_device

__all__ = ["Blocks", "Buffer", "divided", "received", "sent", "vector", "w_vector", "whole"]

ndarray = np.ndarray


class Region:
    """The memory of a buffer, as its bytes in host memory. That of a GPU is copied there and back."""

    __slots__ = ("_bytes", "_device", "_source", "readonly")

    def __init__(self, source: Any, writable: bool = False) -> None:
        self._source, self._device = source, None
        self._bytes: NDArray[np.uint8] | None = None
        if type(source) is ndarray and source.flags.forc:  # whose bytes are looked at only if they are needed
            self.readonly = not source.flags.writeable
            if writable and self.readonly:
                raise BufferError("the array is read-only")
        else:
            data = source if type(source) is buffer and not writable else buffer._over(*expose(source, writable))
            self._source = data
            self._device, self.readonly = find_device(data), data.readonly
            self._bytes = np.empty(data.nbytes, np.uint8) if self._device else np.asarray(data)

    @property
    def nbytes(self) -> int:
        return int(self._source.nbytes)

    def element_type(self) -> Datatype:
        """Return the datatype of an element, from its format; raise KeyError if there is none."""
        if type(self._source) is not ndarray:
            return discover(self._source.element)
        dtype = self._source.dtype
        if dtype.isnative and dtype.char in BY_CHAR:
            return BY_CHAR[dtype.char]
        return discover(memoryview(self._source).format)  # type: ignore[arg-type]  # as in memory.py

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
            raise BufferError("the buffer is read-only")
        return self.read()

    def flush(self, begin: int = 0, end: int | None = None) -> None:
        """Copy these bytes to the GPU if they belong there, and no others: those may have changed meanwhile."""
        if self._device and self._bytes is not None and (changed := self._bytes[begin:end]).size:
            self._device.upload(changed, self._source.address + begin)


class Buffer:
    """A number of elements of one datatype in memory, from an offset in bytes."""

    __slots__ = ("_region", "_target", "count", "offset", "type")

    def __init__(self, region: Region, offset: int, count: int, datatype: Datatype) -> None:
        self._region, self.offset, self.count, self.type = region, offset, count, datatype
        self._target: NDArray[Any] | None = None

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of the memory."""
        return self._region.read()

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.count * int(self.type.size)

    def data(self) -> NDArray[Any]:
        """Return the elements one after the other: a view if they lie so, else a copy."""
        return self.type.pack(self._region.read(), self.offset, self.count)

    def target(self) -> NDArray[Any]:
        """Return an array to receive the elements in; `store` follows."""
        memory = self._region.write()
        if self.type.contiguous:
            self._target = None
            return self.type.pack(memory, self.offset, self.count)
        dtype = self.type.base or np.dtype(np.uint8)
        self._target = np.empty(self.nbytes // dtype.itemsize, dtype)
        return self._target

    def store(self, nbytes: int | None = None) -> None:
        """Store what was received in `target`: all of it, or the first bytes."""
        if self._target is None:
            self._region.flush(self.offset, self.offset + (self.nbytes if nbytes is None else nbytes))
        else:
            data = self._target.view(np.uint8)[:nbytes]
            self.type.unpack(data, self._region.write(), self.offset, self.count)
            self._region.flush()


class Blocks:
    """One block of elements per rank: numbers of elements, offsets in bytes, and datatypes."""

    def __init__(self, region: Region, counts: list[int], offsets: list[int], types: Sequence[Datatype]) -> None:
        self._region, self.counts, self.offsets, self.types = region, counts, offsets, types
        self._lengths = [count * each.size for count, each in zip(counts, types, strict=True)]
        self._target: NDArray[Any] | None = None
        bases = {each.base for each in types}
        self._base: np.dtype[Any] = (bases.pop() if len(bases) == 1 else None) or np.dtype(np.uint8)

    def data(self) -> tuple[NDArray[Any], list[int]]:
        """Return the elements one after the other, and how many items each block has."""
        whole = self._as_one()
        if whole:
            data = whole.data().view(self._base)
        else:
            memory = self._region.read()
            rows = zip(self.types, self.offsets, self.counts, strict=True)
            blocks = [each.pack(memory, at, count).view(np.uint8) for each, at, count in rows if count]
            data = np.concatenate(blocks or [np.empty(0, np.uint8)]).view(self._base)
        return data, [length // self._base.itemsize for length in self._lengths]

    def target(self) -> NDArray[Any]:
        """Return an array to receive the blocks in, one after the other; `store` follows."""
        memory = self._region.write()
        if whole := self._as_one():
            self._target = None
            return whole.type.pack(memory, whole.offset, whole.count).view(self._base)
        self._target = np.empty(sum(self._lengths) // self._base.itemsize, self._base)
        return self._target

    def store(self) -> None:
        """Store what was received in `target`."""
        if self._target is None:
            if whole := self._as_one():
                whole.store()
        else:
            memory, data, start = self._region.write(), self._target.view(np.uint8), 0
            for each, at, count, length in zip(self.types, self.offsets, self.counts, self._lengths, strict=True):
                each.unpack(data[start : start + length], memory, at, count)
                start += length
            self._region.flush()

    def _as_one(self) -> Buffer | None:
        """Return the blocks as one, if they lie one after the other."""
        end = None
        for at, length, count, each in zip(self.offsets, self._lengths, self.counts, self.types, strict=True):
            if count and (end not in (None, at) or each != self.types[0] or not each.contiguous):
                return None
            end = at + length if count else end
        first = next((at for at, count in zip(self.offsets, self.counts, strict=True) if count), 0)
        return Buffer(self._region, first, sum(self.counts), self.types[0]) if self.types else None


# --- Specifications ---------------------------------------------------------------------------------------------------


def sent(spec: Any) -> Buffer:
    """Return the buffer of a send."""
    return _plain(spec) if type(spec) is ndarray else _simple(spec, False)


def received(spec: Any) -> Buffer:
    """Return the buffer of a receive; raise BufferError if it is read-only."""
    if type(spec) is ndarray and spec.flags.writeable:
        return _plain(spec)
    return _simple(spec, True)


whole = sent  # of a collective, which writes by `target` where it receives


def divided(spec: Any, blocks: int) -> Blocks:
    """Return equal blocks. A count in the specification is that of one block."""
    found = _simple(spec, False, blocks)
    each = found.count * int(found.type.extent)
    offsets = [found.offset + rank * each for rank in range(blocks)]
    return Blocks(found._region, [found.count] * blocks, offsets, [found.type] * blocks)


def vector(spec: Any, blocks: int) -> Blocks:
    """Return blocks with counts and displacements in elements.

    Without counts, the first ranks have one element more; without displacements, the blocks follow each other. One
    number stands for a count, or a distance, that all blocks have.
    """
    obj, counts, displs, datatype = _items(spec, tuple)
    region = _region(obj, False)
    found = _type_of(obj, region, datatype)
    if counts is None:
        quotient, rest = divmod(_infer(region, found, 0), blocks) if blocks else (0, 0)
        counts = [quotient + (rank < rest) for rank in range(blocks)]
    elif _is_integer(counts):
        counts = [operator.index(counts)] * blocks
    else:
        counts = _integers(counts, blocks)
    if displs is None:
        displs = [0, *itertools.accumulate(counts)][:blocks]
    elif _is_integer(displs):
        displs = [operator.index(displs) * rank for rank in range(blocks)]
    else:
        displs = _integers(displs, blocks)
    for count in counts:
        _check_count(count, obj)
    extent = int(found.extent)
    return Blocks(region, counts, [displ * extent for displ in displs], [found] * blocks)


def w_vector(spec: Any, blocks: int) -> Blocks:
    """Return blocks with counts, displacements in bytes, and datatypes."""
    if not 2 <= len(spec) <= 4:
        raise ValueError(f"message: expected 2 to 4 items, got {len(spec)}")
    obj, *middle, types = spec
    counts, displs = middle if len(middle) == 2 else middle[0] if middle else (None, None)
    if counts is None and displs is None and obj is not BOTTOM and obj is not None:
        counts, displs = [1] * blocks, [0] * blocks
    if counts is None or displs is None:
        raise ValueError("message: counts without displacements, or none of both for no memory")
    if len(types) != blocks:
        raise ValueError(f"message: expected {blocks} datatypes, got {len(types)}")
    counts = _integers(counts, blocks)
    for count in counts:
        _check_count(count, obj)
    return Blocks(_region(obj, False), counts, _integers(displs, blocks), [_datatype(each) for each in types])


def _plain(array: NDArray[Any]) -> Buffer:
    """Return the buffer of an array without counts and datatype."""
    dtype = array.dtype
    if dtype.isnative and dtype.char in BY_CHAR:
        return Buffer(Region(array), 0, array.size, BY_CHAR[dtype.char])
    return _simple([array, None, None], False)


def _simple(spec: Any, writable: bool, blocks: int = 1) -> Buffer:
    """Return a buffer of one datatype; if it has no count, that of one of some equal blocks."""
    obj, count, displ, datatype = _items(spec, (tuple, list))
    region = _region(obj, writable)
    found = _type_of(obj, region, datatype)
    offset = 0
    if displ is not None and operator.index(displ):
        offset = operator.index(displ) * _extent(found)
        if not 0 <= offset <= region.nbytes:
            raise ValueError(f"message: displacement {displ} is outside of {region.nbytes} bytes")
    if count is None:
        total = _infer(region, found, offset)
        count, rest = divmod(total, max(blocks, 1))
        if rest:
            raise ValueError(f"message: {total} elements cannot be divided into {blocks} equal blocks")
    count = operator.index(count)
    _check_count(count, obj)
    return Buffer(region, offset, count, found)


def _items(spec: Any, pairs: Any) -> tuple[Any, Any, Any, Any]:
    """Return the object, count, displacement and datatype of a specification. `pairs` may hold two of them."""
    if not isinstance(spec, (list, tuple)):
        if spec is None or spec is BOTTOM:
            raise TypeError("message: expected a buffer, or a list or tuple with one")
        return spec, None, None, None
    if not 2 <= len(spec) <= 4:
        raise ValueError(f"message: expected 2 to 4 items, got {len(spec)}")
    obj, *rest = spec
    count = displ = datatype = None
    if len(rest) == 3:
        count, displ, datatype = rest
    else:
        if len(rest) == 2 or isinstance(rest[-1], (Datatype, str)):
            datatype = rest.pop()
        if rest:
            (count,) = rest
        if isinstance(count, pairs):
            count, displ = count
    return obj, count, displ, datatype


def _region(obj: Any, writable: bool) -> Region:
    return Region(np.empty(0, np.uint8) if obj is None or obj is BOTTOM else obj, writable)


def _type_of(obj: Any, region: Region, datatype: Any) -> Datatype:
    if datatype is not None or obj is None or obj is BOTTOM:
        return find_type(datatype)
    return region.element_type()


def _datatype(datatype: Any) -> Datatype:
    if not isinstance(datatype, Datatype):
        raise TypeError(f"expected a Datatype, got {type(datatype).__name__}")
    return datatype


def _extent(datatype: Datatype) -> int:
    extent = int(datatype.extent) if datatype else 0
    if extent <= 0:
        raise ValueError(f"message: the datatype is null, or its extent {extent} is not positive")
    return extent


def _infer(region: Region, datatype: Datatype, offset: int) -> int:
    """Return how many elements the memory from an offset has."""
    length = region.nbytes - offset
    if not length:
        return 0
    count, rest = divmod(length, _extent(datatype))
    if rest:
        raise ValueError(f"message: {length} bytes are no multiple of the extent {datatype.extent}")
    return count


def _check_count(count: int, obj: Any) -> None:
    if count < 0:
        raise ValueError(f"message: negative count {count}")
    if count and obj is None:
        raise ValueError(f"message: count {count} without a buffer")
    if count and obj is BOTTOM:
        raise NotImplementedError("MPI.BOTTOM with absolute addresses: pass the array itself")


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


def _integers(values: Any, count: int) -> list[int]:
    numbers = [operator.index(value) for value in values]
    if len(numbers) != count:
        raise ValueError(f"message: expected {count} numbers, got {len(numbers)}")
    return numbers
