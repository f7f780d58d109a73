"""Arrays on a GPU or on the emulated device, and the time of work queued there."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from ringcomm.bench.sweep import COPY_BYTES

__all__ = ["DeviceArrays"]

ROUND_SECONDS = 0.01  # at least
MOST_CALLS = 400  # in a graph


class DeviceArrays:
    """Arrays on a device; `xp` is the module that computes with them."""

    def __init__(self, name: str, rounds: int, ordinal: int = 0) -> None:
        self._rounds = rounds
        self.xp: Any
        self.address: Callable[[Any], int]
        if name == "cuda":
            import cupy

            from ringcomm.devices import cuda

            cupy.cuda.Device(ordinal).use()
            cupy.cuda.Stream(non_blocking=True).use()  # the default stream does not support capture
            self.device: Any = cuda.device_at(0)  # the current one
            self.xp, self.of, self.values, self.zeros = cupy, cupy.asarray, cupy.asnumpy, cupy.zeros
            self.address = lambda array: array.data.ptr
        else:
            from ringcomm.devices import emulated

            self.device = emulated.device
            self.xp, self.of, self.values = np, emulated.array, np.asarray
            self.zeros = lambda shape, dtype: emulated.array(np.zeros(shape, dtype))
            self.address = lambda array: array.ctypes.data

    def synchronize(self) -> None:
        self.device.stream().synchronize()

    def settle(self) -> None:
        """Order what `xp` does with what is queued: on the emulated device NumPy waits for no stream."""
        if self.device.blocking:
            self.synchronize()

    def time(self, queue: Callable[[], object]) -> float:
        """Return the seconds of one call of `queue`, whose work is queued on the stream."""
        stream = self.device.stream()

        def once(call: Callable[[], object]) -> float:
            start = time.perf_counter()
            call()
            stream.synchronize()
            return time.perf_counter() - start

        try:
            once(queue)
            calls = min(MOST_CALLS, max(1, int(ROUND_SECONDS / once(queue))))
            repeat = self.repeated(queue, calls)
            return median(once(repeat) for _ in range(self._rounds)) / calls
        finally:  # also after an interrupt: queued work uses memory of the caller
            stream.synchronize()

    def repeated(self, queue: Callable[[], object], calls: int) -> Callable[[], object]:
        """Return a function that queues it `calls` times; on a GPU as one graph, whose launch is faster."""

        def repeat() -> None:
            for _ in range(calls):
                queue()

        if self.device.blocking:
            return repeat
        stream = self.device.stream()
        stream.begin_capture()
        try:
            repeat()
        finally:
            graph: Any = stream.end_capture()
        return lambda: graph.launch(stream)

    def copy(self) -> float:
        """Return the bytes per second of a copy."""
        x, y = (self.of(np.ones(COPY_BYTES, np.uint8)) for _ in range(2))
        return COPY_BYTES / self.time(lambda: self.xp.copyto(x, y))
