"""`ringcomm bench --virtual-ranks`: the all_reduce kernels by themselves, several ranks on one GPU in one launch.

No link is between the ranks, so this says how well a kernel uses memory, and nothing of NVLink. `moved` is what all
ranks read and write for it, as bytes of a copy; `of copy` what that is of a plain copy on the same device.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import ArgumentError, files
from ringcomm.bench.interrupts import uninterrupted
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import require_gpu
from ringcomm.bench.plan import COPY_BYTES, Plan
from ringcomm.transports.cuda.virtual import VirtualCall, VirtualRanks
from ringcomm.types import DTYPES, OPS

__all__ = ["HEAD", "Arrays", "Row", "measure", "run"]

HEAD = "#ranks        bytes           kernel blocks       us/op    busbw      moved  of copy  wrong"
ROUND = 0.01  # seconds that the launches of a round take together, at least


@dataclass(frozen=True)
class Row:
    ranks: int
    bytes: int
    kernel: str
    blocks: int
    seconds: float  # the median of a launch
    wrong: int  # elements
    moved: float  # bytes per second, as of a copy
    copy: float

    def __str__(self) -> str:
        busbw = 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds
        return (
            f"{self.ranks:>5} {self.bytes:>12,} {self.kernel:>16} {self.blocks:>6} {self.seconds * 1e6:>10.1f} "
            f"{busbw / 1e9:>8.2f} {self.moved / 1e9:>10.1f} {self.moved / self.copy:>8.2f} {self.wrong:>6}"
        )


class Arrays:
    """Arrays on a device, and a clock for what is queued there."""

    def __init__(self, name: str, rounds: int) -> None:
        self._rounds = rounds
        self.address: Callable[[Any], int]
        if name == "cuda":
            import cupy

            from ringcomm.devices import cuda

            cupy.cuda.Stream(non_blocking=True).use()  # the default stream cannot be captured
            self.device: Any = cuda.device_at(0)
            self.of, self.values, self._copy = cupy.asarray, cupy.asnumpy, cupy.copyto
            self.address = lambda array: array.data.ptr
        else:
            from ringcomm.devices import emulated

            self.device = emulated.device
            self.of, self.values, self._copy = emulated.array, np.asarray, np.copyto
            self.address = lambda array: array.ctypes.data

    def time(self, queue: Callable[[], object]) -> float:
        """Return the seconds of one."""
        stream = self.device.stream()
        try:
            return self._time(queue, stream)
        finally:  # also when it is interrupted: what is queued uses memory that goes with the caller's frame
            stream.synchronize()

    def _time(self, queue: Callable[[], object], stream: Any) -> float:
        queue()
        stream.synchronize()
        start = time.perf_counter()
        queue()
        stream.synchronize()
        calls = max(1, int(ROUND / (time.perf_counter() - start)))
        all_of_them, rounds = self._repeated(queue, calls), []
        for _ in range(self._rounds):
            start = time.perf_counter()
            all_of_them()
            stream.synchronize()
            rounds.append((time.perf_counter() - start) / calls)
        return median(rounds)

    def _repeated(self, queue: Callable[[], object], calls: int) -> Callable[[], object]:
        """Return what queues it so often; on a GPU at once, for a launch takes the host longer than a small kernel."""

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
        """Return the bytes that a copy copies in a second."""
        x, y = (self.of(np.ones(COPY_BYTES, np.uint8)) for _ in range(2))
        return COPY_BYTES / self.time(lambda: self._copy(x, y))


def run(plan: Plan, path: Path | None) -> bool:
    """Measure, print, and write what was found; say whether any element was wrong."""
    if plan.collectives != ["all_reduce"] or plan.device == "host" or plan.dtypes != ["float32"] or plan.ops != ["sum"]:
        given = f"{', '.join(plan.collectives)}, {', '.join(plan.ops)} of {', '.join(plan.dtypes)}, and {plan.device}"
        expected = "expected all_reduce, sum of float32, and --device cuda or emulated"
        raise ArgumentError(f"--virtual-ranks: {expected}, got {given}")
    if plan.device == "cuda":
        require_gpu()
    plan.require(1)
    arrays = Arrays(plan.device, plan.rounds)
    copy = arrays.copy()
    machine, rows = Machine.here(), list[Row]()
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; float32, sum; a copy: {copy / 1e9:.1f} GB/s")
    print(HEAD, flush=True)
    try:
        for ranks in plan.ranks:
            for size in plan.sizes():
                rows.append(measure(arrays, ranks, size, copy))
                print(rows[-1], flush=True)
    finally:  # also when it is interrupted
        if path and rows:
            document = {"machine": asdict(machine), "device": plan.device, "rows": [asdict(row) for row in rows]}
            with uninterrupted():
                files.replace(path, (json.dumps(document, indent=1) + "\n").encode())
    return any(row.wrong for row in rows)


def measure(arrays: Arrays, ranks: int, size: int, copy: float, kernel: str = "") -> Row:
    """`kernel`: in place of the one that is chosen for this size."""
    count = max(1, size // 4)
    base: NDArray[np.float32] = (np.arange(count, dtype=np.int32) % 61).astype(np.float32)
    values = [base + np.float32(rank) for rank in range(ranks)]
    sources, targets = [arrays.of(each) for each in values], [arrays.of(np.zeros_like(base)) for _ in values]
    inputs, outputs = [arrays.address(each) for each in sources], [arrays.address(each) for each in targets]
    group = VirtualRanks(arrays.device, ranks)
    call = VirtualCall(group, "all_reduce", inputs, outputs, count, DTYPES["float32"], OPS["sum"][0], kernel)
    seconds = arrays.time(lambda: call.launch(arrays.device.stream()))
    call.check()
    expected = sum(values)
    wrong = sum(int((arrays.values(target) != expected).sum()) for target in targets)
    rate = moved(call.kernel, ranks) * 4 * count / seconds
    return Row(ranks, 4 * count, call.kernel, call.blocks, seconds, wrong, rate, copy)


def moved(kernel: str, n: int) -> float:
    """Return how often all ranks together copy the array: half of what they read and write, over its length."""
    adding = (n + 1) / 2  # n arrays to one
    return {
        "ring_all_reduce": 3 * n - 2,  # each rank reads 3 n - 2 segments, and writes as many
        "two_shot": 3 * (n - 1) + adding,  # lays down the others' segments, hands out its own, takes theirs
        "one_shot": n * (n - 1 + adding),
        "ll": n * (1.5 * (n - 1) + n),  # what travels is twice as long
    }[kernel]
