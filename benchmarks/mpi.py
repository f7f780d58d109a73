"""Measure ringcomm over MPI in turns with MPI's own all_reduce, in the same processes.

    mpirun -n 4 python benchmarks/mpi.py [-e BYTES]      about a minute on an idle machine

float32, sum, in place. Needs mpi4py. Every rank acts as a host of its own; four ranks are also measured as two hosts of
two. A row is the median over the rounds of the slowest rank, in µs, with the speedup over MPI in parentheses.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import numpy as np

import ringcomm
from ringcomm.options import parse_bytes, readable

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("-e", type=parse_bytes, default="256M", metavar="BYTES", help="the largest array (256M)")
LARGEST = PARSER.parse_args().e
if LARGEST < 4:
    PARSER.error(f"-e: expected at least 4, the bytes of a float32, got {LARGEST}")

from mpi4py import MPI  # noqa: E402 (it starts MPI, which leaves a file in /dev/shm after --help)

SIZES = [4, 1 << 10, 64 << 10, 256 << 10, *(1 << (20 + shift) for shift in range(0, 9, 2))]  # bytes, to 256 MiB
ROUNDS = 15
ROUND_SECONDS = 0.02
MOST_CALLS = 500  # of a round

Call = Callable[[], object]
WORLD = MPI.COMM_WORLD


def main() -> None:
    sizes = [size for size in SIZES if size <= LARGEST]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[WORLD.rank % len(cores)]})
    with ExitStack() as stack:

        def connect(host: int, algorithm: str | None = None) -> ringcomm.Communicator:
            """Connect the ranks; those with the same number act as ranks of one host."""
            config = ringcomm.Config(host_id=f"host {host}", algorithm=algorithm, timeout=60)
            return stack.enter_context(ringcomm.init(config=config, mpi_comm=WORLD))

        comms = {"ring": connect(WORLD.rank, "ring"), "chosen by cost": connect(WORLD.rank)}
        if WORLD.size == 4:
            comms["hierarchy, 2 hosts"] = connect(WORLD.rank // 2)
        columns = [measure(comms, size) for size in sizes]
    if WORLD.rank == 0:
        print(" ".join(MPI.Get_library_version().split(",")[0].split()) + f", {WORLD.size} ranks")
        print(f"{'µs (speedup over MPI)':<24}" + "".join(f"{readable(size):>16}" for size in sizes))
        for name in columns[0]:
            cells = (f"{times[name] * 1e6:,.1f} ({times['MPI'] / times[name]:.2f})" for times in columns)
            print(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells))


def measure(comms: dict[str, ringcomm.Communicator], size: int) -> dict[str, float]:
    """Return the seconds of each all_reduce. All use the same array, since its location in memory changes the time."""
    x = np.zeros(size // 4, np.float32)
    calls: dict[str, Call] = {"MPI": partial(WORLD.Allreduce, MPI.IN_PLACE, x)}
    calls |= {name: partial(comm.all_reduce, x) for name, comm in comms.items()}
    repeat = {}
    for name, call in calls.items():
        x[:] = WORLD.rank + 1
        call()
        if (x != WORLD.size * (WORLD.size + 1) / 2).any():
            raise RuntimeError(f"{name}: wrong sums of {size} bytes on rank {WORLD.rank}")
        x[:] = 0
        repeat[name] = max(1, min(MOST_CALLS, int(ROUND_SECONDS / timed(call, 1))))
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(ROUNDS):
        for name in order:
            rounds[name].append(timed(calls[name], repeat[name]))
        order.append(order.pop(0))  # so that none always follows the same one
    return {name: median(each) for name, each in rounds.items()}


def timed(call: Call, calls: int) -> float:
    """Return the seconds of one call on the slowest rank."""
    call()  # warms the caches
    WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds: float = WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
    return seconds / calls


if __name__ == "__main__":
    main()
