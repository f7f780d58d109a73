"""Measure what the all_reduce kernels do by themselves: several ranks on one GPU, in one launch.

    python benchmarks/virtual_ranks.py                       on the current GPU
    python benchmarks/virtual_ranks.py --device emulated     the same without one, to see that it works

No link is between the ranks, so this says how well a kernel uses memory, and nothing of NVLink. `moved` is what all
ranks read and write for it, as bytes of a copy; `of copy` what that is of a plain copy on the same device.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import parse_bytes
from ringcomm.buffer import ADAPTERS, find_device
from ringcomm.transports.cuda_virtual import VirtualCall, VirtualRanks
from ringcomm.types import DTYPES, OPS

COPY = 256 << 20  # bytes of the copy
ROUNDS = 7


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


def moved(kernel: str, n: int) -> float:
    """Return how often all ranks together copy the array: half of what they read and write, over its length."""
    adding = (n + 1) / 2  # n arrays to one
    return {
        "ring_all_reduce": 3 * n - 2,  # each rank reads 3 n - 2 segments, and writes as many
        "two_shot": 3 * (n - 1) + adding,  # lays down the others' segments, hands out its own, takes theirs
        "one_shot": n * (n - 1 + adding),
        "ll": n * (1.5 * (n - 1) + n),  # what travels is twice as long
    }[kernel]


def measure(arrays: "Arrays", ranks: int, size: int, copy: float) -> Row:
    count = size // 4
    values = [(np.arange(count) % 61 + rank).astype(np.float32) for rank in range(ranks)]
    sources, targets = [arrays.of(each) for each in values], [arrays.of(each * 0) for each in values]
    addresses = [[ADAPTERS[type(x)].memory(x, True)[0].address for x in each] for each in (sources, targets)]
    call = VirtualCall(
        VirtualRanks(arrays.device, ranks), "all_reduce", *addresses, count, DTYPES["float32"], OPS["sum"][0]
    )
    seconds = arrays.time(lambda: call.launch(arrays.device.stream()))
    call.check()
    expected = sum(values)
    wrong = sum(int((arrays.values(target) != expected).sum()) for target in targets)
    rate = moved(call.kernel, ranks) * size / seconds
    return Row(ranks, size, call.kernel, call.blocks, seconds, wrong, rate, copy)


class Arrays:
    """Arrays on a device, and a clock for what is queued there."""

    def __init__(self, name: str) -> None:
        self.device = find_device(name)
        if name == "cuda":
            import cupy

            self.of, self.values, self._copy = cupy.asarray, cupy.asnumpy, cupy.copyto
            self._finish = lambda: cupy.cuda.get_current_stream().synchronize()
        else:
            from ringcomm.devices import emulated

            self.of, self.values, self._copy = emulated.array, np.asarray, np.copyto
            self._finish = lambda: self.device.stream().synchronize()

    def time(self, queue) -> float:
        """Return the seconds of one, from as many in a row as take a hundredth of a second."""
        queue()
        self._finish()
        start = time.perf_counter()
        queue()
        self._finish()
        calls = max(1, int(0.01 / (time.perf_counter() - start)))
        rounds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(calls):
                queue()
            self._finish()
            rounds.append((time.perf_counter() - start) / calls)
        return median(rounds)

    def copy(self) -> float:
        """Return the bytes that a copy copies in a second."""
        x, y = (self.of(np.ones(COPY, np.uint8)) for _ in range(2))
        return COPY / self.time(lambda: self._copy(x, y))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--ranks", default="2,4,8", metavar="N,…", help="default: 2,4,8")
    parser.add_argument("-b", type=parse_bytes, default=4096, metavar="BYTES", help="the smallest array (4K)")
    parser.add_argument("-e", type=parse_bytes, default=256 << 20, metavar="BYTES", help="the largest (256M)")
    parser.add_argument("-f", type=int, default=16, metavar="FACTOR", help="from one size to the next (16)")
    parser.add_argument("-o", type=Path, metavar="FILE", help="where the results go, as JSON")
    options = parser.parse_args()
    arrays = Arrays(options.device)
    copy = arrays.copy()
    machine, rows = Machine.here(), []
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; float32, sum; a copy: {copy / 1e9:.1f} GB/s")
    print("#ranks        bytes           kernel blocks       us/op    busbw      moved  of copy  wrong")
    for ranks in map(int, options.ranks.split(",")):
        size = options.b
        while size <= options.e:
            rows.append(measure(arrays, ranks, size, copy))
            print(rows[-1], flush=True)
            size *= options.f
    if options.o:
        document = {"machine": asdict(machine), "device": options.device, "rows": [asdict(row) for row in rows]}
        options.o.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
