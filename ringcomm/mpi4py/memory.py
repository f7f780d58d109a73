"""Memory of the program's objects: by the buffer protocol, DLPack or __cuda_array_interface__."""

import ctypes
import importlib
import operator
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.constants import Constant

__all__ = [
    *("Aint_add", "Aint_diff", "Alloc_mem", "Free_mem", "Get_address", "buffer", "memory"),
]

HOST, CUDA = 1, 2  # kDLCPU, kDLCUDA
ON_HOST = (1, 3, 11, 13)  # kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged


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
        return cls._over(*expose(obj, False))

    @classmethod
    def _over(cls, data: NDArray[np.uint8], obj: Any, element: str = "B", kind: int = HOST) -> Self:
        self = data.view(cls)
        self.obj, self.element, self.kind = obj, element, kind
        return self

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> "buffer":
        """Return new memory."""
        size = operator.index(nbytes)
        if size < 0:
            raise ValueError(f"expected a size of at least 0 bytes, got {size}")
        data = np.zeros(size, np.uint8) if clear else np.empty(size, np.uint8)
        return buffer._over(data, data)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> "buffer":
        """Return the memory of an object."""
        data, *rest = expose(obj, not readonly)
        return buffer._over(_readonly(data) if readonly else data, *rest)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> "buffer":
        """Return the memory at an address, which must outlive the buffer."""
        size = operator.index(nbytes)
        if size < 0 or (size and not address):
            raise ValueError(f"no memory of {size} bytes at address {address}")
        return buffer._over(_at(operator.index(address), size, readonly), None)

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

    def toreadonly(self) -> "buffer":
        """Return the same memory, not to be written."""
        return buffer._over(_readonly(self), self.obj, self.element, self.kind)

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
        return type(self)._over(data, self) if isinstance(item, slice) else int(data)

    def __setitem__(self, item: Any, value: Any) -> None:
        item = _checked(item)
        if self.readonly:
            raise TypeError("the buffer is read-only")
        if isinstance(item, slice) and not hasattr(type(value), "__index__"):
            value = expose(value, False)[0]
            if value.size != np.ndarray.__getitem__(self, item).size:
                raise ValueError("the lengths of the slice and the value differ")
        np.ndarray.__setitem__(self._on_host(), item, value)

    def __delitem__(self, item: object) -> None:
        raise NotImplementedError("memory cannot be deleted from a buffer")

    def _on_host(self) -> Self:
        if self.kind not in ON_HOST:
            raise BufferError("the memory of the buffer is on a GPU")
        return self


memory = buffer  # its former name


def _checked(item: Any) -> Any:
    """Return an index or slice that a buffer takes."""
    if isinstance(item, slice):
        if item.step not in (None, 1):
            raise IndexError("a buffer has no slices with a step")
        return item
    return operator.index(item)


def Get_address(location: Any) -> int:
    """Return the address of an object's memory."""
    return int(location) if isinstance(location, Constant) else 0 if location is None else buffer(location).address


def Aint_add(base: int, disp: int) -> int:
    """Return an address plus a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return addr1 - addr2


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


def expose(obj: Any, writable: bool) -> tuple[NDArray[np.uint8], Any, str, int]:
    """Return the bytes of an object, what keeps them alive, the format of its elements, and the DLPack kind of device.

    Raises TypeError if it has no memory, and BufferError if it is not contiguous, or must be writable and is not.
    """
    if isinstance(obj, buffer):
        found = np.asarray(obj), obj.obj, "B", obj.kind
    elif isinstance(obj, np.ndarray) and obj.dtype.char in "mM":  # which have no buffers
        found = _by_protocol(obj.view(np.int64), obj)
    else:
        try:
            memoryview(obj)
        except TypeError:
            if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
                found = _by_dlpack(obj)
            elif hasattr(obj, "__cuda_array_interface__"):
                found = _by_cuda_interface(obj)
            else:
                raise TypeError(f"expected an object with a buffer, got {type(obj).__name__}") from None
        else:
            found = _by_protocol(obj, obj)
    if writable and not found[0].flags.writeable:
        raise BufferError(f"the memory of this {type(obj).__name__} is read-only")
    return found


def _by_protocol(obj: Any, owner: Any) -> tuple[NDArray[np.uint8], Any, str, int]:
    view = memoryview(obj)
    if not view.contiguous:
        raise BufferError(f"the memory of this {type(obj).__name__} is not contiguous")
    if not view.c_contiguous:
        obj = np.asarray(obj).T
    data = np.frombuffer(obj, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return _readonly(data) if view.readonly else data, owner, view.format, HOST


def _by_cuda_interface(obj: Any) -> tuple[NDArray[np.uint8], Any, str, int]:
    facts = obj.__cuda_array_interface__
    (address, readonly), typestr, shape = facts["data"], facts["typestr"], facts["shape"]
    order, kind, item, count = typestr[0], typestr[1], int(typestr[2:]), prod(iter(shape))
    strides, described = facts.get("strides"), facts.get("descr")
    if facts.get("mask") is not None:
        raise BufferError("masked arrays on a GPU have no buffer")
    if count < 0:
        raise BufferError(f"invalid shape {shape}")
    if strides is not None and not _contiguous(shape, strides, item):
        raise BufferError(f"the memory of this {type(obj).__name__} is not contiguous")
    if described is not None and (len(described) != 1 or tuple(described[0]) != ("", typestr)):
        warnings.warn("the key 'descr' of __cuda_array_interface__ is ignored", RuntimeWarning, stacklevel=5)
    return _at(address or 0, count * item, bool(readonly), obj), obj, order.strip("|") + _format(kind, item), CUDA


def _contiguous(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Return whether an array is contiguous, in C or in Fortran order."""
    axes = [axis for axis in zip(shape, strides, strict=True) if axis[0] != 1]
    return 0 in shape or any(
        all(stride == item * prod(length for length, _ in order[:axis]) for axis, (_, stride) in enumerate(order))
        for order in (axes, axes[::-1])
    )


def _format(kind: str, item: int) -> str:
    """Return the format of a number, of a byte if NumPy does not know it."""
    try:
        return np.dtype(f"{kind}{item}").char if kind in "biufc" else "B"
    except TypeError:
        return "B"


# --- DLPack -----------------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("device_type", "device_id", "ndim")),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("shape", "strides")),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, ctypes.c_void_p) for name in ("manager", "deleter")),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


READ_ONLY = 1  # in the flags
KINDS = {(0, 1): "i", (1, 1): "u", (2, 1): "f", (2, 2): "c", (5, 1): "c", (6, 1): "b"}  # by code and lanes
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _by_dlpack(obj: Any) -> tuple[NDArray[np.uint8], Any, str, int]:
    # NumPy's from_dlpack takes memory before DLPack 1.0 for read-only, and knows fewer types.
    kind, _ = map(operator.index, obj.__dlpack_device__())
    stream = {} if kind == HOST else {"stream": -1}  # the program synchronizes, as MPI requires
    try:
        capsule, name = obj.__dlpack__(max_version=(1, 0), copy=False, **stream), b"dltensor_versioned"
    except TypeError:  # before DLPack 1.0
        capsule, name = obj.__dlpack__(**stream), b"dltensor"
    try:
        address = _pointer(capsule, name)
    except ValueError:
        raise BufferError("DLPack: invalid capsule") from None
    readonly = False
    if name == b"dltensor":
        tensor = _Tensor.from_address(address)
    else:
        versioned = _Versioned.from_address(address)
        if versioned.major != 1:
            raise BufferError(f"DLPack: version {versioned.major} is not supported")
        tensor, readonly = versioned.tensor, bool(versioned.flags & READ_ONLY)
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise BufferError("DLPack: invalid shape")
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    if any(length < 0 for length in shape):
        raise BufferError(f"DLPack: invalid shape {shape}")
    if tensor.ndim and tensor.strides and not _contiguous(shape, tensor.strides[: tensor.ndim], 1):
        raise BufferError("DLPack: the memory is not contiguous")
    item = (tensor.bits * tensor.lanes + 7) // 8
    element = _format(KINDS.get((tensor.code, tensor.lanes), "?"), item)
    data = _at((tensor.data or 0) + tensor.byte_offset, prod(shape) * item, readonly, capsule)
    return data, obj, element, kind


class _Memory:
    """The base of an array over memory at an address, which keeps the owner of the memory alive."""

    def __init__(self, address: int, size: int, readonly: bool, owner: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, readonly)}
        self.owner = owner


def _at(address: int, size: int, readonly: bool, owner: object = None) -> NDArray[np.uint8]:
    return np.asarray(_Memory(address, size, readonly, owner)) if size else np.empty(0, np.uint8)


def _readonly(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    data = data.view(np.ndarray)
    data.flags.writeable = False
    return data
