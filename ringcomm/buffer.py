"""Any array as the native core takes it: pointer, count and dtype, without a copy.

How a kind of array is read is decided once per type. No framework is imported: a tensor can only be met where the
caller has imported torch.
"""

import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ringcomm.errors import ArgumentError, refuse, unknown
from ringcomm.native import ffi
from ringcomm.types import DTYPES

__all__ = ["ADAPTERS", "CODES", "Adapter", "Memory", "dtype_of"]

Memory = tuple[Any, int, int]  # pointer (cdata that keeps the memory alive where it can), elements, code of the dtype

from_buffer = ffi.from_buffer  # looked up once: this is the path of many calls
cast = ffi.cast


class Adapter(Protocol):
    """How one kind of array is read and made."""

    def memory(self, x: Any, writable: bool) -> Memory: ...
    def shape(self, x: Any) -> tuple[int, ...]: ...
    def empty(self, x: Any, shape: tuple[int, ...]) -> Any: ...


class NumPy:
    """NumPy arrays. The buffer protocol refuses what is read-only or not C-contiguous at no cost of our own."""

    def memory(self, x: Any, writable: bool) -> Memory:
        try:
            pointer = from_buffer("char[]", x, writable)
        except (ValueError, BufferError):
            raise _refusal(x, x.flags.c_contiguous, x.dtype, x.shape) from None
        return pointer, x.size, CODES[x.dtype]

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, x.dtype)


class Viewed(NumPy):
    """Everything NumPy can look into without a copy: the buffer protocol, else DLPack."""

    def memory(self, x: Any, writable: bool) -> Memory:
        view = _view(x)
        if writable and not view.flags.writeable and hasattr(x, "__dlpack__"):
            # DLPack before 1.0 cannot say "read-only", so that NumPy takes all for it: some arrays must never change.
            cure = "before DLPack 1.0 or NumPy 2.1 all are; if it may be written, pass torch.from_dlpack(x)"
            raise refuse("array", "a writable one", f"a read-only one ({type(x).__name__}: {cure})")
        return super().memory(view, writable)

    def shape(self, x: Any) -> tuple[int, ...]:
        return _view(x).shape

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return super().empty(_view(x), shape)


class Torch:
    """PyTorch tensors on the CPU, as raw memory: autograd sees nothing of a collective."""

    def __init__(self, torch: Any) -> None:
        self._codes = {getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)}

    def memory(self, x: Any, writable: bool) -> Memory:  # noqa: ARG002 (tensors know no read-only memory)
        if not x.is_cpu:
            raise _not_on_the_host(x.device)
        # A lazily conjugated or negated tensor is not what lies in its memory.
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            raise _refusal(x, False, x.dtype, tuple(x.shape))
        code = self._codes.get(x.dtype)
        if code is None:
            raise _unsupported(x.dtype)
        address, count = x.data_ptr(), x.numel()
        if not address and count:
            raise refuse("array", "a tensor with memory of its own", type(x).__name__)
        return cast("void *", address), count, code

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.new_empty(shape)


class _Adapters(dict[type, Adapter]):
    """Type → adapter, filled as types are met."""

    def __missing__(self, kind: type) -> Adapter:
        self[kind] = adapter = _find(kind)
        return adapter


class _Codes(dict[Any, int]):
    """NumPy dtype → code, filled as dtypes are met: those of ml_dtypes exist only once it is imported."""

    def __missing__(self, dtype: "np.dtype[Any]") -> int:
        if dtype.name not in DTYPES or not dtype.isnative:
            raise _unsupported(dtype)
        self[dtype] = code = DTYPES[dtype.name]
        return code


ADAPTERS = _Adapters({np.ndarray: NumPy()})
CODES = _Codes()


def dtype_of(name: DTypeLike) -> tuple["np.dtype[Any]", int]:
    """Return the NumPy dtype and the code of what the user called a dtype."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        if str(name) in DTYPES:  # NumPy knows it only by ml_dtypes
            raise ArgumentError(f"dtype {name} needs ml_dtypes: pip install ml_dtypes, and import it") from None
        raise unknown("dtype", name, DTYPES) from None
    return dtype, CODES[dtype]


def _find(kind: type) -> Adapter:
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return Torch(torch)
    return ADAPTERS[np.ndarray] if issubclass(kind, np.ndarray) else Viewed()


def _view(x: Any) -> NDArray[Any]:
    if hasattr(x, "__cuda_array_interface__"):
        raise _not_on_the_host(type(x).__name__)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        if not hasattr(x, "__dlpack__"):
            raise refuse("array", "NumPy, PyTorch, the buffer protocol or DLPack", type(x).__name__) from None
    except ValueError as error:
        raise ArgumentError(f"NumPy cannot read this {type(x).__name__}: {error}") from None
    kind, index = x.__dlpack_device__()
    if kind not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise _not_on_the_host(f"{type(x).__name__} on DLPack device ({kind}, {index})")
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArgumentError(f"NumPy cannot read this {type(x).__name__}: {error}") from None


def _refusal(x: Any, contiguous: bool, dtype: Any, shape: tuple[int, ...]) -> ArgumentError:
    given = f"{type(x).__name__}, {dtype}, shape {shape}"
    if contiguous:
        return refuse("array", "a writable one", f"a read-only one ({given})")
    return refuse("array", "C-contiguous", f"other strides, or lazily conjugated values ({given})")


def _unsupported(dtype: Any) -> ArgumentError:
    return refuse("dtype", f"one of {', '.join(DTYPES)}, in native byte order", str(dtype))


def _not_on_the_host(what: object) -> ArgumentError:
    return refuse("array", "host memory (arrays on a GPU need the CUDA transport)", what)
