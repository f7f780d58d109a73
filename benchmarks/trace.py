"""Measure what a trace costs all-reduces of 1 KiB on 2 ranks, in turns without and with one, for docs/trace.md.

    python benchmarks/trace.py [--turns N]

The time of a turn is the median of its calls, on the slower rank.
"""

import argparse
import tempfile
import time
from statistics import median

import numpy as np

import ringcomm

RANKS, CALLS, BYTES = 2, 3000, 1 << 10


def measure(comm: ringcomm.Communicator, folder: str, turns: int) -> list[tuple[float, float]]:
    """Return the seconds of a call in each turn, without a trace and with one."""
    x = np.zeros(BYTES // 4, np.float32)

    def turn() -> float:
        times = np.empty(CALLS + 1)
        for i in range(CALLS + 1):
            comm.all_reduce(x)
            times[i] = time.perf_counter()
        return float(np.median(np.diff(times)))

    turn()
    results = []
    for _ in range(turns):
        without = turn()
        with comm.trace(folder):
            results.append((without, turn()))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = ringcomm.launch(measure, RANKS, args=(folder, arguments.turns))
    turns = [tuple(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
    without, traced = (min(times) * 1e6 for times in zip(*turns, strict=True))
    print(f"least of {len(turns)} turns: {without:.3f} µs without, {traced:.3f} µs with: {traced / without - 1:+.1%}")
    print(f"median of their ratios: {median(after / before for before, after in turns) - 1:+.1%}")


if __name__ == "__main__":
    main()
