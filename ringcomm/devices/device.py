"""What GPUs and the emulated device have in common: a GPU of a driver library, as the transport uses it."""

import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from ringcomm.devices.contract import CudaStream, KernelVariant, Memory, MessageShape, Shape
from ringcomm.devices.driver import CudaError, Driver
from ringcomm.devices.gpu import DeviceMemory, Gpu, Kernels

__all__ = ["DriverDevice", "DriverEvent", "DriverStream", "DriverTimedEvent"]

LOOKS = 8  # at the clocks of the GPU and of the host
ORIGIN_NS = 4_000_000_000  # then the time since an event is exact to 0.5 us


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


class DriverEvent:
    """A point in a stream."""

    def __init__(self, gpu: Gpu, stream: int, timed: bool = False) -> None:
        self.event = gpu.create_event(timed)
        self._gpu = gpu
        gpu.record(self.event, stream)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with suppress(CudaError):  # the context is broken
                self._gpu.destroy_event(self.event)

    def reached(self) -> bool:
        return self._gpu.reached(self.event)


class DriverTimedEvent(DriverEvent):
    """A point in a stream, and when it was reached."""

    def __init__(self, gpu: Gpu, stream: int, origin: "tuple[DriverTimedEvent, int] | None" = None) -> None:
        super().__init__(gpu, stream, timed=True)
        self._origin = origin

    @property
    def time(self) -> int:
        """Wait for it, and return when it was reached, in ns of time.monotonic_ns()."""
        assert self._origin
        self._gpu.synchronize_event(self.event)  # a kernel says that it ends a moment before its event is reached
        origin, ns = self._origin
        return ns + int(1e6 * self._gpu.elapsed_ms(origin.event, self.event))


class DriverDevice:
    """A device (ringcomm.devices.contract.Device) but for its arrays and its current stream."""

    family: str
    shape: Shape
    message_shape: MessageShape
    threads: int
    blocking = False

    def __init__(self, driver: Driver, ordinal: int, name: str) -> None:
        self.name, self.ordinal, self.library = name, ordinal, driver.library
        self.gpu = Gpu(driver, ordinal)
        self.context = self.gpu.context
        self._loading = threading.Lock()
        self._kernels: dict[KernelVariant, Kernels] = {}
        self._message_kernel = 0
        self._origin: tuple[DriverTimedEvent, int] | None = None  # of the times of events

    def stream(self) -> CudaStream:
        """Return the current stream of the calling thread."""
        raise NotImplementedError

    def _image(self, variant: KernelVariant | None) -> bytes:
        """Return a kernel as the driver loads it; None: that of messages."""
        raise NotImplementedError

    def new_stream(self) -> DriverStream:
        return DriverStream(self.gpu)

    def record(self, stream: CudaStream) -> DriverTimedEvent:
        """Return an event that knows when it is reached: CUDA tells the time between two events in ms, as a float32."""
        if not self._origin or time.monotonic_ns() - self._origin[1] > ORIGIN_NS:
            looks = [self._look_at_clocks() for _ in range(LOOKS)]
            _, event, ns = min(looks, key=lambda look: look[0])  # others may have been interrupted
            self._origin = event, ns
        return DriverTimedEvent(self.gpu, stream.ptr, self._origin)

    def _look_at_clocks(self) -> tuple[int, DriverTimedEvent, int]:
        """Return an event that was reached, and when; before it how many ns that took."""
        begin = time.monotonic_ns()
        event = DriverTimedEvent(self.gpu, self.gpu.copies)
        self.gpu.synchronize_event(event.event)
        end = time.monotonic_ns()
        return end - begin, event, (begin + end) // 2

    def record_event(self, stream: CudaStream) -> DriverEvent:
        return DriverEvent(self.gpu, stream.ptr)

    def capturing(self) -> bool:
        return self.gpu.capturing(self.stream().ptr)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size: int, what: str) -> DeviceMemory:
        return DeviceMemory(self.gpu.allocate(size, what), self.gpu.free)

    def allocate_pinned(self, size: int) -> DeviceMemory:
        return DeviceMemory(self.gpu.allocate_pinned(size), self.gpu.free_pinned)

    def export(self, memory: Memory) -> str:
        return self.gpu.export(memory.address)

    def open(self, handle: str) -> DeviceMemory:
        return DeviceMemory(self.gpu.open(handle), self.gpu.close)

    def write(self, memory: Memory, offset: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        self.gpu.copy(memory.address + offset, source.ctypes.data, len(data), self.gpu.copies)

    def clear(self, memory: Memory, size: int) -> None:
        self.gpu.clear(memory.address, size)

    def copy(self, target: int, source: int, size: int, stream: CudaStream) -> None:
        self.gpu.call("cuMemcpyAsync", target, source, size, stream.ptr)

    def download(self, address: int, target: Any) -> None:
        self.gpu.copy(target.ctypes.data, address, target.nbytes, self.stream().ptr)

    def upload(self, source: Any, address: int) -> None:
        self.gpu.copy(address, source.ctypes.data, source.nbytes, self.stream().ptr)

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def kernel(self, variant: KernelVariant) -> int:
        return self._loaded(variant).one

    def _loaded(self, variant: KernelVariant) -> Kernels:
        with self._loading:
            if variant not in self._kernels:
                self._kernels[variant] = self.gpu.load(self._image(variant))
            return self._kernels[variant]

    def message_kernel(self) -> int:
        with self._loading:
            self._message_kernel = self._message_kernel or self.gpu.load_messages(self._image(None))
        return self._message_kernel

    def launch_virtual(self, variant: KernelVariant, args: Memory, ranks: int, blocks: int, stream: CudaStream) -> None:
        self.gpu.launch_virtual(self._loaded(variant), args.address, ranks, blocks, self.threads, stream.ptr)
