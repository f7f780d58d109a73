"""The emulated device: the CUDA kernels on the CPU, where every thread of every block is a real thread.

Its driver (bindings/emulated_cuda/) has the functions of libcuda, so everything above it is the same as on a GPU. It
tests the protocol on any machine. It is slow.
"""

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ringcomm.arrays.protocols import at_address
from ringcomm.devices.contract import KernelVariant, Memory, MessageShape, Shape
from ringcomm.devices.device import Device, DriverStream
from ringcomm.devices.driver import EMULATED, Driver
from ringcomm.devices.gpu import DeviceMemory, Gpu
from ringcomm.machine import memory

__all__ = [
    "Array",
    "CapturedGraph",
    "EmulatedDevice",
    "Stream",
    "array",
    "calls",
    "capture",
    "configure",
    "device",
    "empty",
    "pinned_bytes",
]

log = logging.getLogger("ringcomm")

driver = Driver(EMULATED)
library = ctypes.CDLL(driver.library)
library.ringcomm_emulated_pinned_bytes.restype = ctypes.c_uint64
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Array(np.ndarray[Any, Any]):
    """A NumPy array on the emulated device, whose memory is that of the host."""


class Stream(DriverStream):
    """A queue of launches, and of steps of the program. In a `with` block it is the current stream of the thread."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        super().__init__(gpu or device.gpu)

    def add(self, step: Callable[[], object]) -> None:
        """Queue a call of Python, on a thread of its own."""
        number = next(_numbers)
        _steps[number] = step
        _call("cuLaunchHostFunc", ctypes.c_void_p(self.ptr), _run, ctypes.c_void_p(number))

    def __enter__(self) -> "Stream":
        _current.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.streams.pop()


class CapturedGraph:
    """Captured launches."""

    def __init__(self, graph: ctypes.c_void_p) -> None:
        self._executable = ctypes.c_void_p()
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_uint64(0))
        _call("cuGraphDestroy", graph)

    def __del__(self) -> None:
        library.cuGraphExecDestroy(self._executable)

    def launch(self, stream: Stream) -> None:
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream.ptr))


class EmulatedDevice(Device):
    """The CPU as a GPU."""

    family = "emulated"
    # Small, so that the calls of a test take many chunks.
    shape = Shape(channels=2, slots=3, slot_bytes=4096, stage_bytes=1024, line_bytes=256)
    message_shape = MessageShape(channels=2, piece_bytes=1024, slots=16, slot_bytes=8192)
    threads = 2  # of a block
    blocking = True

    def __init__(self) -> None:
        super().__init__(driver, 0, "emulated")

    def stream(self) -> Stream:
        return _current.streams[-1]

    def allocate_ipc(self, size: int, what: str) -> DeviceMemory:
        memory.require(size, f"{what} on {self.name}")
        return super().allocate_ipc(size, what)

    def _image(self, variant: KernelVariant | None) -> bytes:  # noqa: ARG002 (its kernels are in the library)
        return b"all kernels are in the library"

    def array(self, owner: Memory, shape: tuple[int, ...], dtype: Any) -> Array:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole: Array = at_address(owner.address, size, False, owner).view(dtype).reshape(shape).view(Array)
        return whole


def array(values: Any, dtype: Any = None) -> Array:
    """Return a copy of an array, on the emulated device."""
    return np.array(values, dtype).view(Array)


def empty(shape: Any, dtype: Any = float) -> Array:
    """Return an array on the emulated device, as numpy.empty does."""
    return np.empty(shape, dtype).view(Array)


@contextmanager
def capture(stream: Stream) -> Iterator[list[CapturedGraph]]:
    """Capture what is queued on a stream in the block into the graph that the list has afterwards."""
    captured: list[CapturedGraph] = []
    _call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.ptr), ctypes.c_int(RELAXED))
    try:
        yield captured
    finally:
        graph = ctypes.c_void_p()
        _call("cuStreamEndCapture", ctypes.c_void_p(stream.ptr), ctypes.byref(graph))
        captured.append(CapturedGraph(graph))


def configure(
    seed: int = 0, skip_launches: bool = False, await_launches: bool = False, unreachable: bool = False
) -> None:
    """Let threads of later launches yield as a seed decides; let launches run no kernel, to time the host, or return
    once their kernel has ended; or let no memory of another process be opened.
    """
    settings = ctypes.c_uint64(seed), *map(ctypes.c_int, (skip_launches, await_launches, unreachable))
    library.ringcomm_emulated_configure(*settings)


def pinned_bytes() -> int:
    """Return how much pinned memory this process has."""
    return int(library.ringcomm_emulated_pinned_bytes())


class Calls(NamedTuple):
    """How often this process has called three functions of the driver."""

    launches: int
    event_records: int
    stream_queries: int


def calls() -> Calls:
    """Return how often this process has called the driver until now."""
    counts = [ctypes.c_uint64() for _ in Calls._fields]
    library.ringcomm_emulated_calls(*map(ctypes.byref, counts))
    return Calls(*(count.value for count in counts))


RELAXED = 2  # of CUstreamCaptureMode: other streams are free meanwhile


class _Current(threading.local):
    """The streams of this thread: its own one, and those of its `with` blocks."""

    def __init__(self) -> None:
        self.streams = [Stream()]


_numbers = itertools.count(1)
_steps: dict[int, Callable[[], object]] = {}


@HostFunction  # type: ignore[untyped-decorator]  # ctypes has no types for it
def _run(number: int) -> None:
    try:
        _steps.pop(number)()
    except Exception:  # of a program; the stream continues, as on a GPU
        log.exception("a step queued on a stream failed")


def _call(name: str, *arguments: Any) -> None:
    with device.gpu.current():
        driver.check(name, getattr(library, name)(*arguments))


device = EmulatedDevice()
_current = _Current()
