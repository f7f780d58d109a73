"""How objects show their memory: the buffer protocol, DLPack and __cuda_array_interface__."""

import ctypes
import operator
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CUDA", "HOST", "Exposed", "at_address", "expose_object", "read_only"]

HOST, CUDA = 1, 2  # kDLCPU, kDLCUDA


class Exposed(NamedTuple):
    """The memory of an object.

    Attributes:
        data: Its bytes.
        owner: What keeps it alive.
        element: The format of its elements.
        kind: The DLPack number of the device.
    """

    data: NDArray[np.uint8]
    owner: Any
    element: str = "B"
    kind: int = HOST


def expose_object(obj: Any) -> Exposed:
    """Return the memory of an object.

    Raises TypeError if it has none, and BufferError if it is not contiguous.
    """
    if isinstance(obj, np.ndarray) and obj.dtype.char in "mM":  # which have no buffers
        return _by_protocol(obj.view(np.int64), obj)
    try:
        memoryview(obj)
    except TypeError:
        if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
            return _by_dlpack(obj)
        if hasattr(obj, "__cuda_array_interface__"):
            return _by_cuda_interface(obj)
        raise TypeError(f"expected an object with a buffer, got {type(obj).__name__}") from None
    return _by_protocol(obj, obj)


def _by_protocol(obj: Any, owner: Any) -> Exposed:
    view = memoryview(obj)
    if not view.contiguous:
        raise BufferError(f"the memory of this {type(obj).__name__} is not contiguous")
    if not view.c_contiguous:
        obj = np.asarray(obj).T
    data = np.frombuffer(obj, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return Exposed(read_only(data) if view.readonly else data, owner, view.format)


def _by_cuda_interface(obj: Any) -> Exposed:
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
        warnings.warn("the key 'descr' of __cuda_array_interface__ is ignored", RuntimeWarning, stacklevel=6)
    data = at_address(address or 0, count * item, bool(readonly), obj)
    return Exposed(data, obj, order.strip("|") + _format(kind, item), CUDA)


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


def _by_dlpack(obj: Any) -> Exposed:
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
    data = at_address((tensor.data or 0) + tensor.byte_offset, prod(shape) * item, readonly, capsule)
    return Exposed(data, obj, element, kind)


class _Memory:
    """The base of an array over memory at an address, which keeps the owner of the memory alive."""

    def __init__(self, address: int, size: int, readonly: bool, owner: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, readonly)}
        self.owner = owner


def at_address(address: int, size: int, readonly: bool, owner: object = None) -> NDArray[np.uint8]:
    """Return the bytes at an address; the array keeps the owner of the memory alive."""
    return np.asarray(_Memory(address, size, readonly, owner)) if size else np.empty(0, np.uint8)


def read_only(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the same bytes, not to be written."""
    data = data.view(np.ndarray)
    data.flags.writeable = False
    return data
