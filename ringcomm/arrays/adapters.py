"""Arrays as the native core takes them: pointer, count and dtype, without a copy.

The adapter of a type of array is looked up once. No framework is imported: a caller who passes a tensor has imported
torch. The fast path reads the most frequent kinds by itself: bindings/python/fast_arrays.h and gpu_arrays.h.
"""

import importlib
import sys
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringcomm.arrays.protocols import read_cuda, view
from ringcomm.devices.contract import Pointer
from ringcomm.errors import ArgumentError, refuse, unknown
from ringcomm.native import ffi, lib
from ringcomm.types import DTYPES

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = [
    "ADAPTERS",
    "CODES",
    "GPU_ARRAYS",
    "TENSORS",
    "Adapter",
    "Memory",
    "check_disjoint",
    "checked_output",
    "dtype_of",
    "find_device",
]

# Pointer (cdata that keeps host memory alive where it can, or a Pointer to a device), elements, code of the dtype.
Memory = tuple[Any, int, int]

from_buffer = ffi.from_buffer  # looked up once: most calls use it
cast = ffi.cast


class Adapter(Protocol):
    """Reads and makes one kind of array."""

    def memory(self, x: Any, writable: bool) -> Memory: ...
    def shape(self, x: Any) -> tuple[int, ...]: ...
    def empty(self, x: Any, shape: tuple[int, ...]) -> Any: ...


class NumPyAdapter:
    """NumPy arrays. The buffer protocol itself refuses read-only and non-contiguous ones, at no extra cost."""

    def memory(self, x: Any, writable: bool) -> Memory:
        try:
            pointer = from_buffer("char[]", x, writable)
        except (ValueError, BufferError):
            if x.flags.c_contiguous:
                raise refuse("array", "a writable one", f"a read-only one ({_describe(x)})") from None
            raise refuse("array", "C-contiguous", f"a non-contiguous array ({_describe(x)})") from None
        return pointer, x.size, CODES[x.dtype]

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, x.dtype)


class ViewAdapter(NumPyAdapter):
    """Objects that NumPy can view without a copy: by the buffer protocol, else DLPack."""

    def memory(self, x: Any, writable: bool) -> Memory:
        seen = view(x)
        if writable and not seen.flags.writeable and hasattr(x, "__dlpack__"):
            # DLPack before 1.0 has no flag for read-only memory, so NumPy takes all for read-only.
            hint = "before DLPack 1.0 or NumPy 2.1 all are; if it may be written, pass torch.from_dlpack(x)"
            raise refuse("array", "a writable one", f"a read-only one ({type(x).__name__}: {hint})")
        return super().memory(seen, writable)

    def shape(self, x: Any) -> tuple[int, ...]:
        return view(x).shape

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return super().empty(view(x), shape)


class TorchAdapter:
    """PyTorch tensors, as raw memory: autograd does not record collectives."""

    def __init__(self, torch: Any) -> None:
        TENSORS.update((torch.Tensor, torch.nn.Parameter))
        CODES.update({getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)})
        current = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing without CUDA
        GPU_ARRAYS["cuda"].update({kind: (TENSOR, current, None) for kind in TENSORS if current})

    def memory(self, x: Any, writable: bool) -> Memory:  # noqa: ARG002 (no tensor is read-only)
        if not (x.is_cpu or x.is_cuda):
            raise refuse("array", "memory of the host or of a GPU", x.device)
        try:
            plain = x.is_contiguous() and not (x.is_conj() or x.is_neg() or x.is_nested)
            address, count = x.data_ptr(), x.numel()
        except RuntimeError:  # a sparse tensor, or inside torch.func.vmap
            raise _refused(x, "memory of its own", "none") from None
        if not plain:  # the memory of a lazily conjugated or negated tensor has other values
            raise _refused(x, "C-contiguous", "a non-contiguous array, or lazily conjugated values")
        if not address and count:
            raise _refused(x, "memory of its own", "none")
        code = CODES[x.dtype]
        if x.is_cuda:
            return Pointer(_cuda().device_of(x.get_device(), tensors=True), address), count, code
        return cast("void *", address), count, code

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.new_empty(shape)


def _refused(x: Any, expected: str, got: str) -> ArgumentError:
    if x.is_nested or str(x.layout) != "torch.strided":
        return refuse("array", "a dense tensor", "a nested one" if x.is_nested else x.layout)
    return refuse("array", expected, f"{got} ({_describe(x)})")


class EmulatedAdapter(NumPyAdapter):
    """Arrays on the emulated device."""

    def __init__(self, emulated: Any) -> None:
        self._device, self._empty = emulated.device, emulated.empty
        device = emulated.device
        GPU_ARRAYS["emulated"][emulated.Array] = EMULATED, lambda _: device.stream(), self.empty

    def memory(self, x: Any, writable: bool) -> Memory:
        _, count, code = super().memory(x, writable)
        return Pointer(self._device, x.ctypes.data), count, code

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self._empty(shape, x.dtype)


class CudaAdapter:
    """CuPy arrays, and other objects with __cuda_array_interface__."""

    def __init__(self) -> None:
        if cupy := sys.modules.get("cupy"):
            GPU_ARRAYS["cuda"][cupy.ndarray] = CUPY, cupy.cuda.get_current_stream, self.empty

    def memory(self, x: Any, writable: bool) -> Memory:
        try:
            found = read_cuda(x)
        except BufferError as error:
            raise ArgumentError(f"the memory of this {type(x).__name__} cannot be read: {error}") from None
        what = f"{type(x).__name__}, {found.typestr}, shape {found.shape}"
        if writable and found.readonly:
            raise refuse("array", "a writable one", f"a read-only one ({what})")
        if not found.in_c_order:
            raise refuse("array", "C-contiguous", f"a non-contiguous array ({what})")
        dtype = x.dtype if hasattr(x, "dtype") else np.dtype(found.typestr)  # one of ml_dtypes has no typestr
        return Pointer(_cuda().device_at(found.address), found.address), prod(found.shape), CODES[dtype]

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.__cuda_array_interface__["shape"])

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return _cuda().empty(x, shape)


class _Adapters(dict[type, Adapter]):
    """Type → adapter, filled on demand."""

    def __missing__(self, kind: type) -> Adapter:
        self[kind] = adapter = _find(kind)
        return adapter


class _Codes(dict[Any, int]):
    """Dtype of NumPy or PyTorch → code, filled on demand: the dtypes of ml_dtypes exist only after its import."""

    def __missing__(self, dtype: Any) -> int:
        if not isinstance(dtype, np.dtype) or dtype.name not in DTYPES or not dtype.isnative:
            raise _unsupported(dtype)
        self[dtype] = code = DTYPES[dtype.name]
        return code


ADAPTERS = _Adapters({np.ndarray: NumPyAdapter()})
CODES = _Codes()
# How the fast path reads arrays on the devices of a family, by type: see GpuArrays in bindings/python/gpu_arrays.h.
GPU_ARRAYS: dict[str, dict[type, tuple[int, Any, Any]]] = {"cuda": {}, "emulated": {}}
TENSOR, CUPY, EMULATED = range(3)
TENSORS: set[type] = set()  # PyTorch's own types, once one was used: subclasses may have no memory of their own


def dtype_of(name: "DTypeLike") -> tuple["np.dtype[Any]", int]:
    """Return the NumPy dtype, and the code, of a dtype given by the user."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        if str(name) in DTYPES:  # NumPy gets it from ml_dtypes
            raise ArgumentError(f"dtype {name} needs ml_dtypes: pip install ml_dtypes, and import it") from None
        raise unknown("dtype", name, DTYPES) from None
    return dtype, CODES[dtype]


def checked_output(out: Any, count: int, dtype: int) -> Any:
    """Return the pointer of `out`; raise ArgumentError unless it has `count` elements of this dtype."""
    pointer, given, kind = ADAPTERS[type(out)].memory(out, True)
    if given != count or kind != dtype:
        names = list(DTYPES)
        raise refuse("out", f"{count} elements of {names[dtype]}", f"{given} of {names[kind]}")
    return pointer


def find_device(name: str) -> Any:
    """Return the device of this name: the current GPU, or the emulated one."""
    if name == "cuda":
        return _cuda().device_at(0)
    if name == "emulated":
        return importlib.import_module("ringcomm.devices.emulated").device
    if not isinstance(name, str):
        raise refuse("device", "a name: host, cuda or emulated", repr(name))
    if name.startswith("cuda:"):
        raise refuse("device", "'cuda', the current GPU, which cupy.cuda.Device(…).use() chooses", repr(name))
    raise unknown("device", name, ["host", "cuda", "emulated"])


def check_disjoint(source: Memory, target: Memory) -> None:
    begins, ends = [], []
    for pointer, count, dtype in (source, target):
        begins.append(pointer.address if isinstance(pointer, Pointer) else int(cast("uintptr_t", pointer)))
        ends.append(begins[-1] + count * lib.rc_dtype_bytes(dtype))
    if max(begins) < min(ends):
        raise refuse("out", "separate memory", "memory that overlaps x")


def _find(kind: type) -> Adapter:
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return TorchAdapter(torch)
    if issubclass(kind, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):  # its mask would be lost silently
        raise refuse("array", "one without a mask (pass x.data or x.filled())", kind.__name__)
    emulated = sys.modules.get("ringcomm.devices.emulated")
    if emulated is not None and issubclass(kind, emulated.Array):
        return EmulatedAdapter(emulated)
    if hasattr(kind, "__cuda_array_interface__"):
        return CudaAdapter()
    return ADAPTERS[np.ndarray] if issubclass(kind, np.ndarray) else ViewAdapter()


def _describe(x: Any) -> str:
    return f"{type(x).__name__}, {x.dtype}, shape {tuple(x.shape)}"


def _unsupported(dtype: Any) -> ArgumentError:
    return refuse("dtype", f"one of {', '.join(DTYPES)}, in native byte order", str(dtype))


def _cuda() -> Any:
    try:
        return importlib.import_module("ringcomm.devices.cuda")
    except ImportError as error:
        hint = "pip install 'ringcomm[cuda12]' or 'ringcomm[cuda13]'"
        raise ArgumentError(f"arrays on a GPU need CuPy ({error}): {hint}") from None
    except RuntimeError as error:  # CUDA's
        raise ArgumentError(f"no GPU can be used: {error}; see `ringcomm doctor`") from None
