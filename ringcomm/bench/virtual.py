"""`ringcomm bench --virtual-ranks`: the all_reduce kernels alone, all ranks on one GPU in one launch.

There is no link between the ranks: this measures how well a kernel uses memory, and nothing of NVLink. `moved` is the
bandwidth of all reads and writes of the kernel, as that of a copy; `of copy` is its share of a plain copy.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import ArgumentError
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import require_gpu
from ringcomm.bench.plan import COPY_BYTES, BenchPlan
from ringcomm.bench.report import write_json
from ringcomm.transports.cuda.virtual import VirtualAllReduce
from ringcomm.types import DTYPES, OPS

__all__ = ["HEAD", "DeviceArrays", "VirtualRow", "measure", "run"]

HEAD = "#ranks        bytes           kernel blocks       us/op    busbw      moved  of copy  wrong"
ROUND_SECONDS = 0.01  # at least


@dataclass(frozen=True)
class VirtualRow:
    ranks: int
    bytes: int
    kernel: str
    blocks: int
    seconds: float  # of a launch, median
    wrong: int  # elements
    moved: float  # bytes per second, as for a copy
    copy: float

    def __str__(self) -> str:
        busbw = 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds
        return (
            f"{self.ranks:>5} {self.bytes:>12,} {self.kernel:>16} {self.blocks:>6} {self.seconds * 1e6:>10.1f} "
            f"{busbw / 1e9:>8.2f} {self.moved / 1e9:>10.1f} {self.moved / self.copy:>8.2f} {self.wrong:>6}"
        )


class DeviceArrays:
    """Arrays on a device, and the time of work queued there."""

    def __init__(self, name: str, rounds: int) -> None:
        self._rounds = rounds
        self.address: Callable[[Any], int]
        if name == "cuda":
            import cupy

            from ringcomm.devices import cuda

            cupy.cuda.Stream(non_blocking=True).use()  # the default stream does not support capture
            self.device: Any = cuda.device_at(0)
            self.of, self.values, self._copy = cupy.asarray, cupy.asnumpy, cupy.copyto
            self.address = lambda array: array.data.ptr
        else:
            from ringcomm.devices import emulated

            self.device = emulated.device
            self.of, self.values, self._copy = emulated.array, np.asarray, np.copyto
            self.address = lambda array: array.ctypes.data

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
            calls = max(1, int(ROUND_SECONDS / once(queue)))
            repeat = self._repeated(queue, calls)
            return median(once(repeat) for _ in range(self._rounds)) / calls
        finally:  # also after an interrupt: queued work uses memory of the caller
            stream.synchronize()

    def _repeated(self, queue: Callable[[], object], calls: int) -> Callable[[], object]:
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
        return COPY_BYTES / self.time(lambda: self._copy(x, y))


def run(plan: BenchPlan, path: Path | None) -> bool:
    """Measure, print and write the results; return whether any element was wrong."""
    if plan.collectives != ["all_reduce"] or plan.device == "host" or plan.dtypes != ["float32"] or plan.ops != ["sum"]:
        given = f"{', '.join(plan.collectives)}, {', '.join(plan.ops)} of {', '.join(plan.dtypes)}, and {plan.device}"
        expected = "expected all_reduce, sum of float32, and --device cuda or emulated"
        raise ArgumentError(f"--virtual-ranks: {expected}, got {given}")
    if plan.device == "cuda":
        require_gpu()
    plan.require(1)
    arrays = DeviceArrays(plan.device, plan.rounds)
    copy = arrays.copy()
    machine, rows = Machine.here(), list[VirtualRow]()
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; float32, sum; a copy: {copy / 1e9:.1f} GB/s")
    print(HEAD, flush=True)
    try:
        for ranks in plan.ranks:
            for size in plan.sizes():
                rows.append(measure(arrays, ranks, size, copy))
                print(rows[-1], flush=True)
    finally:  # also after an interrupt
        if path and rows:
            found = {"machine": asdict(machine), "device": plan.device, "rows": [asdict(row) for row in rows]}
            write_json(path, found)
    return any(row.wrong for row in rows)


def measure(arrays: DeviceArrays, ranks: int, size: int, copy: float, kernel: str = "") -> VirtualRow:
    """Measure one size; `kernel` overrides the kernel selected for it."""
    count = max(1, size // 4)
    base: NDArray[np.float32] = (np.arange(count, dtype=np.int32) % 61).astype(np.float32)
    values = [base + np.float32(rank) for rank in range(ranks)]
    sources, targets = [arrays.of(each) for each in values], [arrays.of(np.zeros_like(base)) for _ in values]
    inputs, outputs = [arrays.address(each) for each in sources], [arrays.address(each) for each in targets]
    call = VirtualAllReduce(arrays.device, inputs, outputs, count, DTYPES["float32"], OPS["sum"][0], kernel)
    seconds = arrays.time(lambda: call.launch(arrays.device.stream()))
    call.check()
    expected = sum(values)
    wrong = sum(int((arrays.values(target) != expected).sum()) for target in targets)
    rate = moved(call.kernel, ranks) * 4 * count / seconds
    return VirtualRow(ranks, 4 * count, call.kernel, call.blocks, seconds, wrong, rate, copy)


def moved(kernel: str, n: int) -> float:
    """Return the number of copies of the array that move as many bytes as the kernel on all ranks."""
    adding = (n + 1) / 2  # n arrays to one
    return {
        "ring_all_reduce": 3 * n - 2,  # each rank reads 3 n - 2 segments, and writes as many
        "two_shot": 3 * (n - 1) + adding,  # stages the others' segments, reduces its own, reads theirs
        "one_shot": n * (n - 1 + adding),
        "ll": n * (1.5 * (n - 1) + n),  # its packets are twice as long as their data
    }[kernel]
