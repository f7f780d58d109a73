"""Pack and Unpack: elements of a layout in memory, and the same elements one after the other."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.constants import UNDEFINED
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_TRUNCATE, ERR_TYPE, failure
from ringcomm.mpi4py.base.integers import integral
from ringcomm.mpi4py.datatypes.layout import Layout
from ringcomm.mpi4py.memory.buffer import buffer, find_device

__all__ = ["Packing"]


class Packing:
    """The methods of a datatype that copy data."""

    _object: Layout | None

    @property
    def _layout(self) -> Layout:
        if self._object is None:
            raise failure(ERR_TYPE, "expected a datatype, got DATATYPE_NULL")
        return self._object

    @property
    def base(self) -> np.dtype[Any] | None:
        """The dtype of packed elements, None if they are of several."""
        return self._layout.base

    @property
    def contiguous(self) -> bool:
        """Whether elements follow each other without gaps."""
        return self._layout.contiguous

    def span(self, count: int) -> tuple[int, int]:
        """Return where the data of `count` elements begins and ends, in bytes from the address of the first one."""
        return self._layout.span(count)

    def pack(self, memory: NDArray[np.uint8], offset: int, count: int) -> NDArray[Any]:
        """Return elements one after the other: a view of the memory if they lie so."""
        return self._layout.pack(memory, offset, count)

    def unpack(self, data: NDArray[Any], memory: NDArray[np.uint8], offset: int, count: int) -> None:
        """Store elements that lie one after the other; there may be fewer than `count`."""
        self._layout.unpack(data, memory, offset, count)

    @integral
    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: object) -> int:  # noqa: ARG002 (all ranks have one format)
        """Pack a buffer into another, from a position in bytes. Returns the position after the data."""
        source, target = _on_host(inbuf, False), _on_host(outbuf, True)
        data = self.pack(source, 0, self._whole(source)).view(np.uint8)
        end = _checked(position) + data.size
        if end > target.size:
            raise failure(ERR_TRUNCATE, f"{data.size} bytes do not fit at position {position} of {target.size}")
        target[position:end] = data
        return end

    @integral
    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: object) -> int:  # noqa: ARG002 (as Pack)
        """Unpack from a position in bytes into a buffer. Returns the position after the data."""
        source, target = _on_host(inbuf, False), _on_host(outbuf, True)
        count = self._whole(target)
        end = _checked(position) + count * self._layout.size
        if end > source.size:
            raise failure(ERR_TRUNCATE, f"expected {end} bytes, got {source.size}")
        self.unpack(source[position:end], target, 0, count)
        return end

    @integral
    def Pack_size(self, count: int, comm: object) -> int:  # noqa: ARG002 (as Pack)
        """Return the bytes that Pack needs for `count` elements."""
        return count * self._layout.size

    def Pack_external(self, *_: object) -> NoReturn:
        """Raise NotImplementedError: there is no portable representation."""
        raise NotImplementedError("Pack_external: there is no external32; all ranks have one format, use Pack")

    Unpack_external = Pack_external_size = Pack_external

    def count_basics(self, nbytes: int) -> int:
        """Return how many basic elements bytes of data are, UNDEFINED if there is a part of one."""
        layout = self._layout
        if layout.base is not None and not layout.base.names:
            return UNDEFINED if nbytes % layout.base.itemsize else nbytes // layout.base.itemsize
        whole, rest = divmod(nbytes, layout.size)
        ends = np.cumsum(layout.basics)
        part = int(np.searchsorted(ends, rest, "right"))
        return UNDEFINED if rest and rest not in ends else whole * len(ends) + part

    def size_of_basics(self, count: int) -> int:
        """Return the bytes of a number of basic elements."""
        layout = self._layout
        if layout.base is not None and not layout.base.names:
            return count * layout.base.itemsize
        whole, rest = divmod(count, max(len(layout.basics), 1))
        return whole * layout.size + int(layout.basics[:rest].sum())

    def _whole(self, memory: NDArray[np.uint8]) -> int:
        """Return how many elements memory has."""
        extent = self._layout.extent
        if extent <= 0:
            raise failure(ERR_TYPE, f"expected a datatype with a positive extent, got {extent}")
        return memory.size // extent


def _checked(position: int) -> int:
    if operator.index(position) < 0:
        raise failure(ERR_ARG, f"position: expected at least 0, got {position}")
    return position


def _on_host(obj: Any, writable: bool) -> NDArray[np.uint8]:
    data = buffer.frombuffer(obj, not writable)
    if find_device(data):
        raise NotImplementedError("Pack and Unpack take no memory on a GPU; copy it to the host")
    return data.view(np.ndarray)
