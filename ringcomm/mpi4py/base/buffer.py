"""Memory of the program: the class buffer, and the functions of addresses."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ringcomm.arrays.protocols import HOST, ON_HOST, at_address, expose, read_only
from ringcomm.mpi4py.base.constants import Constant
from ringcomm.mpi4py.base.integers import integral

__all__ = [
    *("Aint_add", "Aint_diff", "Alloc_mem", "Free_mem", "Get_address", "buffer", "memory"),
]


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):  # noqa: N801 (mpi4py's name)
    """The bytes of an object, or of memory at an address."""

    obj: Any = None  # what keeps the memory alive
    element = "B"  # the format of an element of the object, with its byte order
    kind = HOST  # the DLPack number of the device
    _released = False

    def __new__(cls, *args: Any) -> Self:
        """Make an empty buffer, or that of an object."""
        if not args:
            self = np.empty(0, np.uint8).view(cls)
            self._released = True
            return self
        (obj,) = args
        made: Self = buffer_of(obj, cls=cls)  # type: ignore[assignment]  # of the class that is passed
        return made

    @staticmethod
    @integral
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Return new memory."""
        if nbytes < 0:
            raise ValueError(f"expected a size of at least 0 bytes, got {nbytes}")
        data = np.zeros(nbytes, np.uint8) if clear else np.empty(nbytes, np.uint8)
        return wrap(data, data)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """Return the memory of an object."""
        made = buffer_of(obj, not readonly)
        return made.toreadonly() if readonly else made

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Return the memory at an address, which must outlive the buffer."""
        size = operator.index(nbytes)
        if size < 0 or (size and not address):
            raise ValueError(f"expected an address and a size of at least 0 bytes, got {size} bytes at {address}")
        return wrap(at_address(operator.index(address), size, readonly), None)

    @property
    def address(self) -> int:
        """The address of the memory."""
        return 0 if self._released else int(self.__array_interface__["data"][0])

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return 0 if self._released else self.size * self.itemsize

    @property
    def readonly(self) -> bool:
        """Whether the memory may not be written."""
        return not (self._released or self.flags.writeable)

    @property
    def format(self) -> str:
        """The format of an element: a byte."""
        return "B"

    def cast(self, format: str, shape: Sequence[int] | None = None) -> memoryview:
        """Return the memory with another format or shape."""
        view: Any = memoryview(self._on_host())  # type: ignore[arg-type]  # NumPy says so only from Python 3.12 on
        cast: memoryview = view.cast(format) if shape is None else view.cast(format, shape)
        return cast

    def tobytes(self, order: str | None = None) -> bytes:  # noqa: ARG002 (as a memoryview's)
        """Return a copy of the memory."""
        return np.ndarray.tobytes(self._on_host())

    def toreadonly(self) -> buffer:
        """Return the same memory, not to be written."""
        return wrap(read_only(self), self.obj, self.element, self.kind)

    def release(self) -> None:
        """Forget the memory."""
        self.obj, self._released = None, True

    def __len__(self) -> int:
        return self.nbytes

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def __repr__(self) -> str:
        return f"<buffer of {self.nbytes} bytes at {self.address:#x}>"

    __str__ = __repr__  # the memory may be on a GPU

    def __getitem__(self, item: Any) -> Any:
        data = np.ndarray.__getitem__(self._on_host(), _checked(item))
        return wrap(data, self, cls=type(self)) if isinstance(item, slice) else int(data)

    def __setitem__(self, item: Any, value: Any) -> None:
        item = _checked(item)
        if self.readonly:
            raise TypeError("expected a buffer that may be written, got one that is read-only")
        if isinstance(item, slice) and not hasattr(type(value), "__index__"):
            value = np.asarray(buffer_of(value))
            room = np.ndarray.__getitem__(self, item).size
            if value.size != room:
                raise ValueError(f"expected {room} bytes for the slice, got {value.size}")
        np.ndarray.__setitem__(self._on_host(), item, value)

    def __delitem__(self, item: object) -> None:
        raise NotImplementedError("memory cannot be deleted from a buffer")

    def _on_host(self) -> Self:
        if self.kind not in ON_HOST:
            raise BufferError("expected memory of the host, got that of a GPU")
        return self


memory = buffer  # its former name


def _checked(item: Any) -> Any:
    """Return an index or slice that a buffer takes."""
    if isinstance(item, slice):
        if item.step not in (None, 1):
            raise IndexError(f"expected a slice without a step, got the step {item.step}")
        return item
    return operator.index(item)


def Get_address(location: Any) -> int:
    """Return the address of an object's memory."""
    return int(location) if isinstance(location, Constant) else 0 if location is None else buffer(location).address


@integral
def Aint_add(base: int, disp: int) -> int:
    """Return an address plus a displacement."""
    return base + disp


@integral
def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return addr1 - addr2


@integral
def Alloc_mem(size: int, info: object = None) -> buffer:  # noqa: ARG001 (there are no kinds of memory to choose)
    """Return new memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Release memory."""
    mem.release()


def find_device(data: buffer) -> Any:
    """Return the device of the memory, None if it is the host's."""
    if data.kind in ON_HOST:
        emulated = sys.modules.get("ringcomm.devices.emulated")
        return emulated.device if emulated is not None and isinstance(data.obj, emulated.Array) else None
    cuda = _cuda()
    return cuda and cuda.device_at(data.address)


@cache
def _cuda() -> Any:
    """Return the module for GPUs; None if there are none, so that all memory is the host's."""
    try:
        cuda = importlib.import_module("ringcomm.devices.cuda")
        cuda.device_at(0)
    except (ImportError, RuntimeError):
        return None
    return cuda


def buffer_of(obj: Any, writable: bool = False, cls: type[buffer] = buffer) -> buffer:
    """Return the memory of an object.

    Raises TypeError if it has none, and BufferError if it is not contiguous, or must be writable and is not.
    """
    if isinstance(obj, buffer):
        made = wrap(np.asarray(obj), obj.obj, "B", obj.kind, cls)
    else:
        has_times = isinstance(obj, np.ndarray) and obj.dtype.char in "mM"  # which have no buffers
        found = expose(obj.view(np.int64) if has_times else obj)
        made = wrap(found.data, obj, found.element, found.kind, cls)
    if writable and not made.flags.writeable:
        raise BufferError(f"expected memory that may be written, got a {type(obj).__name__} that is read-only")
    return made


def wrap(data: NDArray[Any], owner: Any, element: str = "B", kind: int = HOST, cls: type[buffer] = buffer) -> buffer:
    """Return the buffer of bytes, which keeps their owner alive."""
    made = data.view(cls)
    made.obj, made.element, made.kind = owner, element, kind
    return made
