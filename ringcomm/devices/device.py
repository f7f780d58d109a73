"""A device that runs kernels, as the transports use it: a GPU of a driver library, or the emulated one."""

import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from ringcomm.devices import descriptors
from ringcomm.devices.contract import CudaStream, KernelVariant, Memory, MessageShape, Shape
from ringcomm.devices.driver import CudaError, Driver
from ringcomm.devices.gpu import DeviceMemory, Gpu, Kernels
from ringcomm.devices.limits import Limits, estimated, limits

__all__ = ["Device", "DriverStream", "Event", "TimedEvent", "channels"]

LOOKS = 8  # at the clocks of the GPU and of the host
ORIGIN_NS = 4_000_000_000  # then the time since an event is exact to 0.5 us


def channels(multiprocessors: int, ranks: int) -> int:
    """Return how many blocks each of several ranks on one GPU has, a power of two.

    With 64, two ranks on an H200 reached 0.89 of the speed of a copy.
    """
    fitting = max(1, multiprocessors // ranks)
    return min(64, 1 << (fitting.bit_length() - 1))


class DriverStream:
    """A stream of its own."""

    def __init__(self, gpu: Gpu) -> None:
        self.ptr = gpu.create_stream()
        self._gpu = gpu

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with suppress(CudaError, AttributeError):  # the context is broken; it was never made
                self._gpu.destroy_stream(self.ptr)

    def synchronize(self) -> None:
        self._gpu.synchronize(self.ptr)


class Event:
    """A point in a stream: reached when everything queued before it has ended."""

    def __init__(self, gpu: Gpu, stream: int, timed: bool = False) -> None:
        self.event = gpu.create_event(timed)
        self._gpu = gpu
        gpu.record(self.event, stream)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with suppress(CudaError):  # the context is broken
                self._gpu.destroy_event(self.event)

    def reached(self) -> bool:
        """Return whether it is. Raises what has failed before it."""
        return self._gpu.reached(self.event)


class TimedEvent(Event):
    """A point in a stream, and when it was reached."""

    def __init__(self, gpu: Gpu, stream: int, origin: "tuple[TimedEvent, int] | None" = None) -> None:
        super().__init__(gpu, stream, timed=True)
        self._origin = origin

    @property
    def time(self) -> int:
        """Wait for it, and return when it was reached, in ns of time.monotonic_ns()."""
        assert self._origin
        self._gpu.synchronize_event(self.event)  # a kernel says that it ends a moment before its event is reached
        origin, ns = self._origin
        return ns + int(1e6 * self._gpu.elapsed_ms(origin.event, self.event))


class Device:
    """One rank's view of the device that holds its arrays. A subclass knows these arrays and the current stream."""

    family: str  # "cuda" or "emulated"
    shape: Shape  # where this rank has the device to itself
    message_shape: MessageShape
    threads: int  # of a block
    blocking = False  # whether calls return only when they are done, as with NumPy arrays
    by_descriptor = False  # whether `export` is by file descriptors, else by cudaIpc

    def __init__(self, driver: Driver, ordinal: int, name: str) -> None:
        self.name, self.ordinal, self.library = name, ordinal, driver.library
        self.gpu = Gpu(driver, ordinal)
        self.context, self.uuid = self.gpu.context, self.gpu.uuid
        self._loading = threading.Lock()
        self._kernels: dict[KernelVariant, Kernels] = {}
        self._message_kernel = 0
        self._origin: tuple[TimedEvent, int] | None = None  # of the times of events

    def shape_for(self, sharing: int, multiprocessors: int) -> Shape:  # noqa: ARG002 (other devices depend on both)
        """Return the sizes in the arena of each of so many ranks on a device with so many multiprocessors.

        All their blocks must run at once.
        """
        return self.shape

    @property
    def _staged_bytes(self) -> int:
        """What the blocks of a rank stage at once."""
        return self.shape.channels * self.shape.stage_bytes

    def limits(self, ranks: int) -> Limits:
        """Return up to how many bytes each kernel for small arrays is chosen, in a group of so many ranks."""
        return limits(self.gpu.name, ranks, estimated(self.shape.line_bytes, self._staged_bytes, ranks))

    def stream(self) -> CudaStream:
        """Return the current stream of the calling thread."""
        raise NotImplementedError

    def array(self, owner: Memory, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array over memory that keeps it alive."""
        raise NotImplementedError

    def _image(self, variant: KernelVariant | None) -> bytes:
        """Return a kernel as the driver loads it; None: that of messages."""
        raise NotImplementedError

    def new_stream(self) -> DriverStream:
        """Return a stream that waits for nothing the program has queued."""
        return DriverStream(self.gpu)

    def record(self, stream: CudaStream) -> TimedEvent:
        """Return an event that knows when it is reached: CUDA tells the time between two events in ms, as a float32."""
        if not self._origin or time.monotonic_ns() - self._origin[1] > ORIGIN_NS:
            looks = [self._look_at_clocks() for _ in range(LOOKS)]
            _, event, ns = min(looks, key=lambda look: look[0])  # others may have been interrupted
            self._origin = event, ns
        return TimedEvent(self.gpu, stream.ptr, self._origin)

    def _look_at_clocks(self) -> tuple[int, TimedEvent, int]:
        """Return an event that was reached, and when; before it how many ns that took."""
        begin = time.monotonic_ns()
        event = TimedEvent(self.gpu, self.gpu.copies)
        self.gpu.synchronize_event(event.event)
        end = time.monotonic_ns()
        return end - begin, event, (begin + end) // 2

    def record_event(self, stream: CudaStream) -> Event:
        return Event(self.gpu, stream.ptr)

    def capturing(self) -> bool:
        """Return whether launches on the current stream are captured into a graph, to be replayed later."""
        return self.gpu.capturing(self.stream().ptr)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: int, what: str) -> DeviceMemory:
        """Return zeroed memory that other processes can open. Raises MemoryShortage, which names `what`."""
        if self.by_descriptor:
            return DeviceMemory(self.gpu.allocate_virtual(size, what), descriptors.close)
        return self.allocate_ipc(size, what)

    def allocate_ipc(self, size: int, what: str) -> DeviceMemory:
        """The same, for memory that the core exports, always by cudaIpc."""
        return DeviceMemory(self.gpu.allocate(size, what), self.gpu.free)

    def allocate_pinned(self, size: int) -> DeviceMemory:
        """Return zeroed host memory that kernels access at the same address. Raises MemoryShortage."""
        return DeviceMemory(self.gpu.allocate_pinned(size), self.gpu.free_pinned)

    def export(self, memory: Memory) -> str:
        """Return a handle with which peers open the memory."""
        return self.gpu.export(memory.address, self.by_descriptor)

    def open(self, handle: str) -> DeviceMemory:
        return DeviceMemory(self.gpu.open(handle), self.gpu.close)

    def write(self, memory: Memory, offset: int, data: bytes) -> None:
        """Write from the host; return when the data is there."""
        source = np.frombuffer(data, np.uint8)
        self.gpu.copy(memory.address + offset, source.ctypes.data, len(data), self.gpu.copies)

    def clear(self, memory: Memory, size: int) -> None:
        """Write zeros; return when they are there."""
        self.gpu.clear(memory.address, size)

    def copy(self, target: int, source: int, size: int, stream: CudaStream) -> None:
        """Queue a copy between any two of device memory and pinned host memory."""
        self.gpu.call("cuMemcpyAsync", target, source, size, stream.ptr)

    def download(self, address: int, target: Any) -> None:
        """Copy to a NumPy array after everything queued on the current stream; return when the data is there."""
        self.gpu.copy(target.ctypes.data, address, target.nbytes, self.stream().ptr)

    def upload(self, source: Any, address: int) -> None:
        """Copy from a NumPy array after everything queued on the current stream; return when the data is there."""
        self.gpu.copy(address, source.ctypes.data, source.nbytes, self.stream().ptr)

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def kernel(self, variant: KernelVariant) -> int:
        """Compile and load a kernel, unless it is loaded, and return its CUfunction."""
        return self._loaded(variant).one

    def _loaded(self, variant: KernelVariant) -> Kernels:
        with self._loading:
            if variant not in self._kernels:
                self._kernels[variant] = self.gpu.load(self._image(variant))
            return self._kernels[variant]

    def message_kernel(self) -> int:
        """Compile and load the kernel of messages, unless it is loaded, and return its CUfunction."""
        with self._loading:
            self._message_kernel = self._message_kernel or self.gpu.load_messages(self._image(None))
        return self._message_kernel

    def launch_virtual(self, variant: KernelVariant, args: bytes, ranks: int, blocks: int, stream: CudaStream) -> None:
        """Queue one launch of a loaded kernel for several ranks on this device: a VirtualRanks (kernels.cuh).

        Raises ArgumentError if not all blocks can run concurrently.
        """
        self.gpu.launch_virtual(self._loaded(variant), args, ranks, blocks, self.threads, stream.ptr)
