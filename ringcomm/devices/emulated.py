"""The emulated device: the CUDA kernels on the CPU, where every thread of every block is a real thread.

It tests the protocol on any machine. It is slow.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from ringcomm.devices.contract import KernelVariant, Memory, Shape
from ringcomm.errors import MemoryShortage
from ringcomm.machine import memory
from ringcomm.machine.threads import start_thread
from ringcomm.native import check, ffi, lib

__all__ = ["Array", "EmulatedDevice", "array", "device", "empty"]

log = logging.getLogger("ringcomm")


class Array(np.ndarray[Any, Any]):
    """A NumPy array on the emulated device, whose memory is that of the host."""


class SharedMapping:
    """Memory that other processes can map."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def __del__(self) -> None:
        os.close(self.descriptor)


class ArrayBase:
    """The base of an array over memory, which keeps it alive."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory = memory
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (memory.address, False)}


class HostMemory:
    """Memory of this process."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.address: int = data.ctypes.data


class EmulatedEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time = 0

    def reach(self) -> None:
        self.time = time.monotonic_ns()
        self._reached.set()

    @property
    def done(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


class Stream:
    """Runs launches one after the other, on a thread that ends with the last of them."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._queued = 0

    def add(self, step: Callable[[], object]) -> None:
        with self._changed:
            if self._queued == 0:
                start_thread("ringcomm emulated stream", self._run)
            self._queue.put(step)
            self._queued += 1

    def _run(self) -> None:
        while True:
            try:
                self._queue.get()()
            except Exception:  # of a program; the stream continues, as on a GPU
                log.exception("a step queued on a stream failed")
            with self._changed:
                self._queued -= 1
                if not self._queued:
                    return

    def record(self) -> EmulatedEvent:
        event = EmulatedEvent()
        self.add(event.reach)
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        self.add(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> "Stream":
        _current.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.streams.pop()


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams = [Stream()]


_current = _Current()


class EmulatedDevice:
    """The CPU as a GPU (ringcomm.devices.contract.Device). `seed` not 0: threads yield at flags, as it decides."""

    name = "emulated"
    # Small, so that the calls of a test take many chunks.
    shape = Shape(channels=2, slots=3, slot_bytes=4096, stage_bytes=1024, line_bytes=256)
    threads = 2  # of a block
    memory_outlives_owner = True
    blocking = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def stream(self) -> Stream:
        return _current.streams[-1]

    def new_stream(self) -> Stream:
        return Stream()

    def record(self, stream: Stream, timed: bool = False) -> EmulatedEvent:  # noqa: ARG002
        return stream.record()

    def wait(self, stream: Stream, event: EmulatedEvent) -> None:
        stream.wait_event(event)

    def capturing(self) -> bool:
        return False

    def exempt_from_capture(self) -> None:
        pass

    def allocate(self, size: int, what: str) -> SharedMapping:
        memory.require(size, f"{what} on {self.name}")
        try:
            descriptor = os.memfd_create("ringcomm emulated device", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            return SharedMapping(descriptor, size)
        except OSError as error:  # out of descriptors or addresses
            raise MemoryShortage(f"{what} on {self.name}: {error}", expected=size) from error

    def export(self, memory: SharedMapping) -> str:
        return f"/proc/{os.getpid()}/fd/{memory.descriptor}"

    def open(self, handle: str) -> SharedMapping:
        descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
        return SharedMapping(descriptor, os.fstat(descriptor).st_size)

    def allocate_pinned(self, size: int) -> HostMemory:
        return HostMemory(np.zeros(size, np.uint8))

    def write(self, memory: SharedMapping, offset: int, data: bytes) -> None:
        ctypes.memmove(memory.address + offset, data, len(data))

    def clear(self, memory: SharedMapping, size: int) -> None:
        ctypes.memset(memory.address, 0, size)

    def download(self, address: int, target: Any) -> None:
        self.stream().synchronize()
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def upload(self, source: Any, address: int) -> None:
        self.stream().synchronize()
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def prepare(self, variant: KernelVariant) -> None:
        """Do nothing: all kernels are in the library."""

    def launch(self, _: KernelVariant, args: Any, blocks: int, stream: Stream) -> None:
        self._queue(ffi.from_buffer(args), 1, blocks, stream)

    def launch_virtual(self, _: KernelVariant, args: SharedMapping, ranks: int, blocks: int, stream: Stream) -> None:
        self._queue(ffi.cast("void *", args.address), ranks, blocks, stream)

    def _queue(self, args: Any, ranks: int, blocks: int, stream: Stream) -> None:
        stream.add(lambda: check(lib.rc_emulated_launch(args, ranks, blocks, self.threads, self._seed)))

    def array(self, memory: Memory, shape: tuple[int, ...], dtype: Any) -> Array:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole: Array = np.asarray(ArrayBase(memory, size)).view(dtype).reshape(shape).view(Array)
        return whole


device = EmulatedDevice()


def array(values: Any, dtype: Any = None) -> Array:
    """Return a copy of an array, on the emulated device."""
    return np.array(values, dtype).view(Array)


def empty(shape: Any, dtype: Any = float) -> Array:
    """Return an array on the emulated device, as numpy.empty does."""
    return np.empty(shape, dtype).view(Array)
