"""NVIDIA GPUs, through CuPy. docs/gpu.md lists which parts have run on one.

Every call names the array's device and a stream; the current device and stream belong to the program.
"""

import ctypes
import secrets
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, function, runtime

from ringcomm.devices.compiler import cubin
from ringcomm.devices.contract import KernelVariant, Memory, Shape
from ringcomm.errors import MemoryShortage, refuse

__all__ = ["CudaDevice", "device_at", "device_of", "empty"]

runtime.getDeviceCount()  # raises without a GPU

PORTABLE_AND_MAPPED = 0x03  # of cudaHostAlloc
SUCCESS, NO_MEMORY, NOT_READY, ALREADY_ENABLED, IMPLICIT = 0, 2, 600, 704, 906  # of cudaError_t
RELAXED = 2  # of CUstreamCaptureMode
PAGE = 2 << 20  # cudaMalloc returns parts of blocks of this size, and an IPC handle opens a whole block
ORIGIN_NS = 4_000_000_000  # then the time since an event is exact to 0.5 us
PROCESS = secrets.token_hex(8)  # an IPC handle opens in other processes only


class GpuMemory:
    """Memory that kernels access, with the function that frees it; none for memory of another rank of this process."""

    def __init__(self, address: int, free: Any = None) -> None:
        self.address, self._free = address, free

    def __del__(self) -> None:
        if self._free and not sys.is_finalizing():
            with suppress(runtime.CUDARuntimeError):  # the context is destroyed or broken
                self._free(self.address)


class CudaEvent:
    """A point in a stream. CuPy's own event reports every failure as "not done"."""

    def __init__(self, stream: Any, origin: "tuple[Any, int] | None" = None) -> None:
        self.event = cupy.cuda.Event(block=True, disable_timing=origin is None)
        self.event.record(stream)
        self._origin = origin  # an earlier event with its time, for the time of this one

    @property
    def done(self) -> bool:
        status = runtime.eventQuery(self.event.ptr)
        if status not in (SUCCESS, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == SUCCESS)

    @property
    def time(self) -> int:
        assert self._origin
        event, ns = self._origin
        return ns + int(1e6 * cupy.cuda.get_elapsed_time(event, self.event))


class CudaDevice:
    """A GPU (ringcomm.devices.contract.Device)."""

    shape = Shape(channels=16, slots=8, slot_bytes=512 << 10, stage_bytes=32 << 10, line_bytes=8 << 10)
    threads = 512  # of a block, at most the launch bounds of entry.cu
    memory_outlives_owner = False
    blocking = False

    def __init__(self, ordinal: int) -> None:
        self.name = f"cuda:{ordinal}"
        self._device = cupy.cuda.Device(ordinal)
        self._architecture = f"sm_{self._device.compute_capability}"
        self._copies = self.new_stream()
        self._loading = threading.Lock()
        self._kernels: dict[KernelVariant, Any] = {}
        self._origin: tuple[Any, int] | None = None  # of the times of events

    def stream(self) -> Any:
        return cupy.cuda.get_current_stream(self._device.id)

    def new_stream(self) -> Any:
        with self._device:
            return cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any, timed: bool = False) -> CudaEvent:
        with self._device:
            return CudaEvent(stream, self._recent_origin() if timed else None)

    def _recent_origin(self) -> tuple[Any, int]:
        """Return an event and when it was reached: CUDA tells the time between two events in ms, as a float32."""
        if not self._origin or time.monotonic_ns() - self._origin[1] > ORIGIN_NS:
            event = cupy.cuda.Event(block=True)
            event.record(self._copies)
            event.synchronize()
            self._origin = event, time.monotonic_ns()
        return self._origin

    def wait(self, stream: Any, event: CudaEvent) -> None:
        with self._device:
            stream.wait_event(event.event)

    def capturing(self) -> bool:
        try:
            with self._device:
                return bool(self.stream().is_capturing())
        except runtime.CUDARuntimeError as error:  # the default stream, while another thread captures
            if error.status == IMPLICIT:
                return True
            raise

    def exempt_from_capture(self) -> None:
        mode = ctypes.c_int(RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def allocate(self, size: int, what: str) -> GpuMemory:
        try:
            with self._device:
                memory = GpuMemory(runtime.malloc(-(-size // PAGE) * PAGE), runtime.free)  # outside CuPy's pool
        except runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            raise MemoryShortage(f"{what} on {self.name}: {error}", expected=size) from None
        self.clear(memory, size)
        return memory

    def export(self, memory: GpuMemory) -> str:
        with self._device:
            handle = bytes(runtime.ipcGetMemHandle(memory.address)).hex()
        return f"{PROCESS} {self._device.id} {memory.address} {handle}"

    def open(self, handle: str) -> GpuMemory:
        process, ordinal, address, ipc = handle.split()
        with self._device:
            if process != PROCESS:
                opened = runtime.ipcOpenMemHandle(bytes.fromhex(ipc), runtime.cudaIpcMemLazyEnablePeerAccess)
                return GpuMemory(opened, runtime.ipcCloseMemHandle)
            if int(ordinal) != self._device.id:
                self._enable_peer_access(int(ordinal))
            return GpuMemory(int(address))

    def _enable_peer_access(self, ordinal: int) -> None:
        try:
            runtime.deviceEnablePeerAccess(ordinal)
        except runtime.CUDARuntimeError as error:
            if error.status != ALREADY_ENABLED:
                raise

    def allocate_pinned(self, size: int) -> GpuMemory:
        with self._device:
            memory = GpuMemory(runtime.hostAlloc(size, PORTABLE_AND_MAPPED), runtime.freeHost)
        ctypes.memset(memory.address, 0, size)
        return memory

    def write(self, memory: GpuMemory, offset: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        self._copy(memory.address + offset, source.ctypes.data, len(data), runtime.memcpyHostToDevice, self._copies)

    def clear(self, memory: GpuMemory, size: int) -> None:
        with self._device:
            runtime.memsetAsync(memory.address, 0, size, self._copies.ptr)
            self._copies.synchronize()

    def download(self, address: int, target: Any) -> None:
        self._copy(target.ctypes.data, address, target.nbytes, runtime.memcpyDeviceToHost, self.stream())

    def upload(self, source: Any, address: int) -> None:
        self._copy(address, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, self.stream())

    def prepare(self, variant: KernelVariant) -> None:
        if variant in self._kernels:
            return
        with self._loading, self._device:
            module = function.Module()
            module.load(cubin(variant, self._architecture))
            functions = module.get_function("ringcomm_kernel"), module.get_function("ringcomm_virtual")
            self._kernels.setdefault(variant, functions)

    def launch(self, variant: KernelVariant, args: Any, blocks: int, stream: Any) -> None:
        by_value = args.view(f"V{args.size}")  # CuPy passes a NumPy array of one element by value
        with self._device:
            self._kernels[variant][0]((blocks,), (self.threads,), (by_value,), stream=stream)

    def launch_virtual(self, variant: KernelVariant, args: GpuMemory, ranks: int, blocks: int, stream: Any) -> None:
        _, code = self._kernels[variant]
        with self._device:
            each = driver.occupancyMaxActiveBlocksPerMultiprocessor(code.ptr, self.threads, 0)
            most = each * self._device.attributes["MultiProcessorCount"]
            if ranks * blocks > most:  # CuPy would launch fewer blocks
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
    """The same GPU for tensors: its current stream is torch's."""

    def stream(self) -> Any:
        return cupy.cuda.Stream.from_external(TorchStream(sys.modules["torch"].cuda.current_stream(self._device.id)))


class TorchStream:
    """A stream of torch in CuPy's protocol, which torch itself has since 2.10."""

    def __init__(self, stream: Any) -> None:
        self._pointer = int(stream.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer  # the version of the protocol


@cache
def device_of(ordinal: int, tensors: bool = False) -> CudaDevice:
    """Return a GPU, with the current stream of CuPy or, for tensors, of torch."""
    return (TorchDevice if tensors else CudaDevice)(ordinal)


def device_at(address: int) -> CudaDevice:
    """Return the GPU of an address; of address 0, as of an empty array, the current one."""
    return device_of(_ordinal(address))


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an array with the dtype of another, on the same GPU."""
    address, _ = like.__cuda_array_interface__["data"]
    with cupy.cuda.Device(_ordinal(address)):
        return cupy.empty(shape, like.dtype)


def _ordinal(address: int) -> int:
    return int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())
