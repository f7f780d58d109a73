"""NVIDIA GPUs, through CuPy. docs/performance.md says what of this has run on one.

Everything is done on the device of the array, whichever is current, and on streams that are named: what is current
belongs to the program.
"""

import ctypes
import secrets
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, function, runtime

from ringcomm.devices.compiler import cubin
from ringcomm.devices.contract import Memory, Shape
from ringcomm.errors import MemoryShortage, refuse
from ringcomm.native import ffi

__all__ = ["CudaDevice", "device_at", "device_of", "empty"]

runtime.getDeviceCount()  # raises where there is none

PORTABLE_AND_MAPPED = 0x03  # of cudaHostAlloc
LAZY_PEER_ACCESS = runtime.cudaIpcMemLazyEnablePeerAccess
SUCCESS, NO_MEMORY, NOT_READY, ALREADY_ENABLED, IMPLICIT = 0, 2, 600, 704, 906  # of cudaError_t
RELAXED = 2  # of CUstreamCaptureMode
PAGE = 2 << 20  # cudaMalloc hands out parts of such blocks, and a handle opens a whole one
PROCESS = secrets.token_hex(8)  # a handle opens in other processes only


class Allocation:
    """Memory by plain cudaMalloc, which nothing else shares."""

    def __init__(self, size: int) -> None:
        self.address: int = runtime.malloc(-(-size // PAGE) * PAGE)

    def __del__(self) -> None:
        _release(runtime.free, self)


class Opened:
    """Memory of another process."""

    def __init__(self, handle: bytes) -> None:
        self.address: int = runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS)

    def __del__(self) -> None:
        _release(runtime.ipcCloseMemHandle, self)


class Here:
    """Memory of another rank of this process."""

    def __init__(self, address: int) -> None:
        self.address = address


class Pinned:
    """Host memory that kernels reach at the same address."""

    def __init__(self, size: int) -> None:
        self.address: int = runtime.hostAlloc(size, PORTABLE_AND_MAPPED)
        ffi.memmove(ffi.cast("char *", self.address), bytes(size), size)

    def __del__(self) -> None:
        _release(runtime.freeHost, self)


class CudaEvent:
    """A place in a stream. CuPy's own takes every failure for "not yet"."""

    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(block=True, disable_timing=True)
        self.event.record(stream)

    @property
    def done(self) -> bool:
        status = runtime.eventQuery(self.event.ptr)
        if status not in (SUCCESS, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == SUCCESS)


class CudaDevice:
    """A GPU (ringcomm.devices.contract.Device)."""

    shape = Shape(channels=16, slots=8, slot_bytes=512 << 10, stage_bytes=32 << 10, line_bytes=8 << 10)
    threads = 512  # of a block, at most what entry.cu says
    outlives = False
    blocking = False

    def __init__(self, ordinal: int) -> None:
        self.name = f"cuda:{ordinal}"
        self._device = cupy.cuda.Device(ordinal)
        self._architecture = f"sm_{self._device.compute_capability}"
        self._own = self.new_stream()
        self._loading = threading.Lock()
        self._kernels: dict[tuple[int, int, int], Any] = {}

    def stream(self) -> Any:
        return cupy.cuda.get_current_stream(self._device.id)

    def new_stream(self) -> Any:
        with self._device:
            return cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any) -> CudaEvent:
        with self._device:
            return CudaEvent(stream)

    def wait(self, stream: Any, event: CudaEvent) -> None:
        with self._device:
            stream.wait_event(event.event)

    def capturing(self) -> bool:
        try:
            with self._device:
                return bool(self.stream().is_capturing())
        except runtime.CUDARuntimeError as error:  # the default stream may not be asked while another thread captures
            if error.status == IMPLICIT:
                return True
            raise

    def watch(self) -> None:
        mode = ctypes.c_int(RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def allocate(self, size: int, what: str) -> Allocation:
        try:
            with self._device:
                memory = Allocation(size)
        except runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            raise MemoryShortage(f"{what} on {self.name}: {error}", expected=size) from None
        self.clear(memory, size)
        return memory

    def export(self, memory: Allocation) -> str:
        with self._device:
            handle = bytes(runtime.ipcGetMemHandle(memory.address)).hex()
        return f"{PROCESS} {self._device.id} {memory.address} {handle}"

    def open(self, exported: str) -> Opened | Here:
        process, ordinal, address, handle = exported.split()
        with self._device:
            if process != PROCESS:
                return Opened(bytes.fromhex(handle))
            if int(ordinal) != self._device.id:
                self._reach(int(ordinal))
            return Here(int(address))

    def _reach(self, ordinal: int) -> None:
        try:
            runtime.deviceEnablePeerAccess(ordinal)
        except runtime.CUDARuntimeError as error:
            if error.status != ALREADY_ENABLED:
                raise

    def shared_with_host(self, size: int) -> Pinned:
        with self._device:
            return Pinned(size)

    def write(self, memory: Allocation, offset: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        self._copy(memory.address + offset, source.ctypes.data, len(data), runtime.memcpyHostToDevice, self._own)

    def clear(self, memory: Allocation, size: int) -> None:
        with self._device:
            runtime.memsetAsync(memory.address, 0, size, self._own.ptr)
            self._own.synchronize()

    def download(self, address: int, target: Any) -> None:
        self._copy(target.ctypes.data, address, target.nbytes, runtime.memcpyDeviceToHost, self.stream())

    def upload(self, source: Any, address: int) -> None:
        self._copy(address, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, self.stream())

    def prepare(self, kernel: int, dtype: int, op: int) -> None:
        if (kernel, dtype, op) in self._kernels:
            return
        with self._loading, self._device:
            module = function.Module()
            module.load(cubin(kernel, dtype, op, self._architecture))
            functions = module.get_function("ringcomm_kernel"), module.get_function("ringcomm_virtual")
            self._kernels.setdefault((kernel, dtype, op), functions)

    def launch(self, kernel: int, dtype: int, op: int, args: Any, blocks: int, stream: Any) -> None:
        by_value = args.view(f"V{args.size}")  # a NumPy array of one element is handed over by value
        with self._device:
            self._kernels[kernel, dtype, op][0]((blocks,), (self.threads,), (by_value,), stream=stream)

    def launch_virtual(
        self, kernel: int, dtype: int, op: int, args: Allocation, ranks: int, blocks: int, stream: Any
    ) -> None:
        _, code = self._kernels[kernel, dtype, op]
        with self._device:
            each = driver.occupancyMaxActiveBlocksPerMultiprocessor(code.ptr, self.threads, 0)
            most = each * self._device.attributes["MultiProcessorCount"]
            if ranks * blocks > most:  # CuPy would launch fewer
                raise refuse("virtual ranks", f"at most {most} blocks in all", f"{ranks} x {blocks}")
            numbers = np.uint64(args.address), np.int32(blocks)
            code((ranks * blocks,), (self.threads,), numbers, stream=stream, enable_cooperative_groups=True)

    def array(self, memory: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        owner = cupy.cuda.UnownedMemory(memory.address, size, memory, self._device.id)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owner, 0))

    def _copy(self, target: int, source: int, size: int, kind: int, stream: Any) -> None:
        with self._device:
            runtime.memcpyAsync(target, source, size, kind, stream.ptr)
            stream.synchronize()


class TorchDevice(CudaDevice):
    """The same, where the current stream is that of torch: for tensors."""

    def stream(self) -> Any:
        return cupy.cuda.Stream.from_external(TorchStream(sys.modules["torch"].cuda.current_stream(self._device.id)))


class TorchStream:
    """A stream of torch as CuPy wants it told; torch itself does so since 2.10."""

    def __init__(self, stream: Any) -> None:
        self._pointer = int(stream.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer  # the version of the protocol


def _release(free: Any, memory: Any) -> None:
    address, memory.address = getattr(memory, "address", 0), 0
    if address and not sys.is_finalizing():
        with suppress(runtime.CUDARuntimeError):  # the context is gone, or broken
            free(address)


@cache
def device_of(ordinal: int, tensors: bool = False) -> CudaDevice:
    """Return a GPU, as CuPy's arrays or torch's tensors see it."""
    return (TorchDevice if tensors else CudaDevice)(ordinal)


def device_at(address: int) -> CudaDevice:
    """Return the GPU that memory is on; where there is none, as in an empty array, the current one."""
    return device_of(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of the dtype of another, and on the same GPU."""
    address = like.__cuda_array_interface__["data"][0]
    ordinal = runtime.pointerGetAttributes(address).device if address else runtime.getDevice()
    with cupy.cuda.Device(ordinal):
        return cupy.empty(shape, like.dtype)
