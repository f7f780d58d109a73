"""Specifications of buffers: an array, or a list of it with counts, displacements and datatypes."""

import itertools
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.constants import BottomType
from ringcomm.mpi4py.buffers.memory import Blocks, Buffer, BufferMemory, absolute, covered
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.datatypes.layout import Layout
from ringcomm.mpi4py.datatypes.predefined import BY_CHAR, find_type

__all__ = ["Blocks", "Buffer", "divided", "received", "sent", "vector", "w_vector", "whole"]

ndarray = np.ndarray


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
    each = found.count * found.layout.extent
    offsets = [found.offset + rank * each for rank in range(blocks)]
    return Blocks(found.memory, [found.count] * blocks, offsets, [found.layout] * blocks)


def vector(spec: Any, blocks: int) -> Blocks:
    """Return blocks with counts and displacements in elements.

    Without counts, the first ranks have one element more; without displacements, the blocks follow each other. One
    number stands for a count, or a distance, that all blocks have.
    """
    obj, counts, displs, datatype = _items(spec, tuple)
    memory = _memory_of(obj, False)
    found = _layout_of(obj, memory, datatype, infers=counts is None)
    if counts is None:
        quotient, rest = divmod(_infer(memory, found, 0), blocks) if blocks else (0, 0)
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
    return _blocks(obj, memory, counts, [displ * found.extent for displ in displs], [found] * blocks)


def w_vector(spec: Any, blocks: int) -> Blocks:
    """Return blocks with counts, displacements in bytes, and datatypes."""
    if not 2 <= len(spec) <= 4:
        raise ValueError(f"message: expected 2 to 4 items, got {len(spec)}")
    obj, *middle, types = spec
    memory = _memory_of(obj, False)
    counts, displs = middle if len(middle) == 2 else middle[0] if middle else (None, None)
    if counts is None and displs is None and not _is_empty(obj):
        counts, displs = [int(memory.nbytes > 0)] * blocks, [0] * blocks  # an empty array has no elements
    if counts is None or displs is None:
        raise ValueError(f"message: expected counts and displacements, got {counts} and {displs}")
    if len(types) != blocks:
        raise ValueError(f"message: expected {blocks} datatypes, got {len(types)}")
    counts = _integers(counts, blocks)
    for count in counts:
        _check_count(count, obj)
    for each in types:
        if not isinstance(each, Datatype):
            raise TypeError(f"expected a Datatype, got {type(each).__name__}")
    return _blocks(obj, memory, counts, _integers(displs, blocks), [each._named for each in types])


def _blocks(obj: Any, memory: BufferMemory, counts: list[int], offsets: list[int], layouts: list[Layout]) -> Blocks:
    elements = list(zip(offsets, counts, layouts, strict=True))
    if isinstance(obj, BottomType):
        memory, address = absolute(elements)
        first = -address
    else:
        memory, first = memory.reach(*covered(elements))
    offsets = [offset + first for offset in offsets]
    return Blocks(memory, counts, offsets, layouts)


def _plain(array: NDArray[Any]) -> Buffer:
    """Return the buffer of an array without counts and datatype."""
    dtype = array.dtype
    if dtype.isnative and dtype.char in BY_CHAR:
        return Buffer(BufferMemory(array), 0, array.size, BY_CHAR[dtype.char])
    return _simple([array, None, None], False)


def _simple(spec: Any, writable: bool, blocks: int = 1) -> Buffer:
    """Return a buffer of one datatype; if it has no count, that of one of some equal blocks."""
    obj, count, displ, datatype = _items(spec, (tuple, list))
    memory = _memory_of(obj, writable)
    displ = 0 if displ is None else operator.index(displ)
    found = _layout_of(obj, memory, datatype, infers=count is None or displ != 0)
    offset = 0
    if displ:
        offset = displ * _extent(found)
        if not (isinstance(obj, BottomType) or 0 <= offset <= memory.nbytes):
            raise ValueError(f"message: displacement {displ} is outside of {memory.nbytes} bytes")
    if count is None:
        total = _infer(memory, found, offset)
        count, rest = divmod(total, max(blocks, 1))
        if rest:
            raise ValueError(f"message: {total} elements cannot be divided into {blocks} equal blocks")
    count = operator.index(count)
    _check_count(count, obj)
    if isinstance(obj, BottomType):
        memory, address = absolute([(offset, count * blocks, found)])
        return Buffer(memory, offset - address, count, found)
    begin, end = found.span(count * blocks)
    memory, first = memory.reach(offset + begin, offset + end)
    return Buffer(memory, offset + first, count, found)


def _items(spec: Any, pairs: Any) -> tuple[Any, Any, Any, Any]:
    """Return the object, count, displacement and datatype of a specification. `pairs` may hold two of them."""
    if not isinstance(spec, (list, tuple)):
        if _is_empty(spec):
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


def _memory_of(obj: Any, writable: bool) -> BufferMemory:
    return BufferMemory(np.empty(0, np.uint8) if _is_empty(obj) else obj, writable)


def _is_empty(obj: Any) -> bool:
    """Return whether a buffer has no memory of its own: None, and BOTTOM, from which addresses count."""
    return obj is None or isinstance(obj, BottomType)


def _layout_of(obj: Any, memory: BufferMemory, datatype: Any, infers: bool) -> Layout:
    """Return the layout of the elements, from whose extent `infers` says whether an offset or a count follows."""
    if datatype is None and not _is_empty(obj):
        return memory.element_layout()
    found = find_type(datatype)
    if infers and not found:
        raise ValueError("message: expected a datatype with a positive extent, got DATATYPE_NULL")
    return found._named


def _extent(layout: Layout) -> int:
    if layout.extent <= 0:
        raise ValueError(f"message: expected a datatype with a positive extent, got {layout.extent}")
    return layout.extent


def _infer(memory: BufferMemory, layout: Layout, offset: int) -> int:
    """Return how many elements the memory from an offset has."""
    length = memory.nbytes - offset
    if not length:
        return 0
    count, rest = divmod(length, _extent(layout))
    if rest:
        raise ValueError(f"message: {length} bytes are no multiple of the extent {layout.extent}")
    return count


def _check_count(count: int, obj: Any) -> None:
    if count < 0:
        raise ValueError(f"message: expected a count of at least 0, got {count}")
    if count and obj is None:
        raise ValueError(f"message: expected a count of 0 without a buffer, got {count}")


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


def _integers(values: Any, count: int) -> list[int]:
    numbers = [operator.index(value) for value in values]
    if len(numbers) != count:
        raise ValueError(f"message: expected {count} numbers, got {len(numbers)}")
    return numbers
