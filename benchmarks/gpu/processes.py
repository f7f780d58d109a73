"""Processes on GPUs, over IPC: values, what a call costs, graphs; with --fail, a graph whose peer does not replay.

    ringcomm run -n 2 benchmarks/gpu/processes.py [--fail] [--emulated] [--rows FILE]

Every input differs from the one before; wrong elements are counted on the GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # also with PYTHONSAFEPATH

import ringcomm
from gpu.rows import Rows
from ringcomm import Communicator, RingcommError
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.machine import gpus

COUNTS, FEW = (1, 2048, 16_384, 262_144, 4 << 20), (1, 2048)
CHECKED, CALLS, GRAPH = 20, 40, 10
FAIL_TIMEOUT = 3.0  # seconds


class Processes:
    def __init__(self, comm: Communicator, arrays: DeviceArrays, rows: Path | None) -> None:
        self.comm, self.arrays = comm, arrays
        self.rows = Rows(rows if comm.rank == 0 else None)

    def add(self, **row: object) -> None:
        if self.comm.rank == 0:
            self.rows.add(check="processes", ranks=self.comm.size, **row)

    def check(self) -> int:
        """Return the number of wrong elements of all ranks."""
        counts = FEW if self.arrays.device.blocking else COUNTS
        return sum(map(self.calls, counts)) + (0 if self.arrays.device.blocking else self.graph())

    def calls(self, count: int) -> int:
        comm, arrays, xp = self.comm, self.arrays, self.arrays.xp
        base, x, wrong = arrays.zeros(count, "float32"), arrays.zeros(count, "float32"), arrays.zeros(1, "int64")
        base += xp.arange(count) % 61
        for k in range(CHECKED):
            xp.add(base, k * (comm.rank + 1), out=x)
            comm.all_reduce(x)
            arrays.settle()
            wrong += (x != base * comm.size + k * (comm.size * (comm.size + 1) // 2)).sum()
        comm.check()

        def call() -> None:
            comm.all_reduce(x)

        def queue() -> None:
            for _ in range(CALLS):
                call()

        x.fill(0)
        comm.barrier()
        host = median(seconds(call) for _ in range(CALLS))
        comm.barrier()
        found = comm.all_gather_object((int(arrays.values(wrong)[0]), host, self.timed(queue) / CALLS))
        bad: int = sum(each[0] for each in found)
        slowest, queued = (max(each[i] for each in found) for i in (1, 2))
        self.add(bytes=4 * count, wrong=bad, host_us=round(1e6 * slowest, 1), queued_us=round(1e6 * queued, 1))
        return bad

    def capture(self, x: object, calls: int) -> Callable[[], object]:
        """Return a function that launches a graph of calls, whose kernel has been compiled and loaded."""
        self.comm.all_reduce(x)
        self.arrays.synchronize()
        return self.arrays.repeated(lambda: self.comm.all_reduce(x), calls)

    def graph(self) -> int:
        comm, x, wrong, took = self.comm, self.arrays.zeros(2048, "float32"), 0, 0.0
        launch = self.capture(x, GRAPH)
        for k in range(1, 4):
            x.fill(k)
            self.arrays.synchronize()
            comm.barrier()
            took = self.timed(launch) / GRAPH
            wrong += int((x != k * comm.size**GRAPH).sum())
        comm.check()
        of_all: int = sum(comm.all_gather_object(wrong))
        self.add(graph_of=GRAPH, bytes=x.nbytes, wrong=of_all, us=round(1e6 * took, 1))
        return of_all

    def fail(self) -> int:
        """Replay a graph on rank 0 alone; return 0 if it learns of that each time."""
        x = self.arrays.zeros(1000, "float32")
        launch = self.capture(x, 1)
        self.comm.barrier()
        if self.comm.rank > 0:
            time.sleep(4 * FAIL_TIMEOUT)
            return 0
        silent = 0
        for k in range(3):
            x.fill(7)
            took, raised = self.timed(launch), reason(self.comm.check)
            self.add(replay=k, seconds=round(took, 2), x=float(self.arrays.values(x)[0]), check=raised)
            silent += not raised
        raised = reason(lambda: self.comm.all_reduce(x))
        self.add(call_after=raised)
        return silent + (not raised)

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds until the work that `call` queues is done."""
        self.arrays.synchronize()
        start = time.perf_counter()
        call()
        self.arrays.synchronize()
        return time.perf_counter() - start


def reason(call: Callable[[], object]) -> str:
    try:
        call()
    except RingcommError as error:
        return f"{type(error).__name__}: {error}"[:160]
    return ""


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fail", action="store_true", help="replay a graph that a peer does not replay")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device: tries this program")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="rank 0 appends its rows to FILE, as JSON lines")
    options = parser.parse_args()
    comm = ringcomm.init(timeout=FAIL_TIMEOUT if options.fail else 20)
    ordinal = comm.rank % max(1, len(gpus()))
    it = Processes(comm, DeviceArrays("emulated" if options.emulated else "cuda", 1, ordinal), options.rows)
    if options.fail:
        return int(it.fail() > 0)
    wrong = it.check()
    comm.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
