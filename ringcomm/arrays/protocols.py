"""How objects show their memory: the buffer protocol, DLPack and __cuda_array_interface__."""

import ctypes
import operator
import warnings
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringcomm.errors import ArgumentError, refuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HOST", "ON_HOST", "CudaArray", "Exposed", "at_address", "expose", "read_cuda", "read_only", "view"]

HOST, CUDA, CUDA_HOST = 1, 2, 3  # kDLCPU, kDLCUDA, kDLCUDAHost
ON_HOST = (HOST, CUDA_HOST, 11, 13)  # kDLROCMHost, kDLCUDAManaged


def view(x: Any) -> "NDArray[Any]":
    """Return NumPy's view of host memory, by the buffer protocol, else by DLPack, as far as NumPy reads it.

    Raises ArgumentError for any other object.
    """
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        if not hasattr(x, "__dlpack__"):
            raise refuse("array", "NumPy, PyTorch, the buffer protocol or DLPack", type(x).__name__) from None
    except ValueError as error:
        raise ArgumentError(f"NumPy cannot read this {type(x).__name__}: {error}") from None
    kind, index = x.__dlpack_device__()
    if kind not in (HOST, CUDA_HOST):
        what = f"{type(x).__name__} on DLPack device ({kind}, {index})"
        raise refuse("array", "host memory, or a GPU's by __cuda_array_interface__", what)
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArgumentError(f"NumPy cannot read this {type(x).__name__}: {error}") from None


class Exposed(NamedTuple):
    """The contiguous memory of an object, in C or in Fortran order.

    Attributes:
        data: Its bytes.
        element: The format of its elements.
        kind: The DLPack number of the device.
    """

    data: "NDArray[np.uint8]"
    element: str
    kind: int = HOST


def expose(obj: Any) -> Exposed:
    """Return the memory of an object, in host memory or on a GPU, whether NumPy knows its elements or not.

    Raises TypeError if it has none, and BufferError if it is not contiguous.
    """
    try:
        found = memoryview(obj)
    except TypeError:
        if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
            return _by_dlpack(obj)
        if hasattr(obj, "__cuda_array_interface__"):
            array = read_cuda(obj)
            if not array.is_contiguous:
                raise _not_contiguous(obj) from None
            data = at_address(array.address, prod(array.shape) * array.item, array.readonly, obj)
            return Exposed(data, array.typestr[0].strip("|") + _format(array.typestr[1], array.item), CUDA)
        raise TypeError(f"expected an object with a buffer, got {type(obj).__name__}") from None
    if not found.contiguous:
        raise _not_contiguous(obj)
    flat = obj if found.c_contiguous else np.asarray(obj).T
    data = np.frombuffer(flat, np.uint8) if found.nbytes else np.empty(0, np.uint8)
    return Exposed(read_only(data) if found.readonly else data, found.format)


class CudaArray(NamedTuple):
    """What __cuda_array_interface__ says: `typestr` as in NumPy, lengths in elements, strides in bytes."""

    address: int
    readonly: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    typestr: str

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return int(self.typestr[2:])

    @property
    def in_c_order(self) -> bool:
        return self.strides is None or _in_order(self.shape[::-1], self.strides[::-1], self.item)

    @property
    def is_contiguous(self) -> bool:
        return self.strides is None or _contiguous(self.shape, self.strides, self.item)


def read_cuda(obj: Any) -> CudaArray:
    """Return the facts of an array on a GPU; raise BufferError if they are wrong."""
    facts = obj.__cuda_array_interface__
    (address, readonly), typestr, shape = facts["data"], facts["typestr"], facts["shape"]
    described = facts.get("descr")
    if facts.get("mask") is not None:
        raise BufferError("masked arrays on a GPU have no buffer")
    if prod(iter(shape)) < 0:
        raise BufferError(f"invalid shape {shape}")
    if not address and prod(shape):
        raise BufferError(f"a null pointer to an array of shape {tuple(shape)}")
    if described is not None and (len(described) != 1 or tuple(described[0]) != ("", typestr)):
        warnings.warn("the key 'descr' of __cuda_array_interface__ is ignored", RuntimeWarning, stacklevel=4)
    return CudaArray(address or 0, bool(readonly), tuple(shape), facts.get("strides"), typestr)


def _not_contiguous(obj: object) -> BufferError:
    return BufferError(f"the memory of this {type(obj).__name__} is not contiguous")


def _contiguous(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Return whether an array is contiguous, in C or in Fortran order."""
    return _in_order(shape, strides, item) or _in_order(shape[::-1], strides[::-1], item)


def _in_order(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Return whether an array is contiguous, its first axis being the innermost."""
    if 0 in shape:
        return True
    for length, stride in zip(shape, strides, strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


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


def _by_dlpack(obj: Any) -> Exposed:
    # NumPy's from_dlpack takes memory before DLPack 1.0 for read-only, knows fewer types, and no memory of GPUs.
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
    if not tensor.data and prod(shape):
        raise BufferError(f"DLPack: a null pointer to an array of shape {tuple(shape)}")
    if tensor.ndim and tensor.strides and not _contiguous(shape, tensor.strides[: tensor.ndim], 1):
        raise _not_contiguous(obj)
    item = (tensor.bits * tensor.lanes + 7) // 8
    element = _format(KINDS.get((tensor.code, tensor.lanes), "?"), item)
    data = at_address((tensor.data or 0) + tensor.byte_offset, prod(shape) * item, readonly, capsule)
    return Exposed(data, element, kind)


class _Memory:
    """The base of an array over memory at an address, which keeps the owner of the memory alive."""

    def __init__(self, address: int, size: int, readonly: bool, owner: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, readonly)}
        self.owner = owner


def at_address(address: int, size: int, readonly: bool, owner: object = None) -> "NDArray[np.uint8]":
    """Return the bytes at an address; the array keeps the owner of the memory alive."""
    return np.asarray(_Memory(address, size, readonly, owner)) if address else np.empty(0, np.uint8)


def read_only(data: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    """Return the same bytes, not to be written."""
    data = data.view(np.ndarray)
    data.flags.writeable = False
    return data
