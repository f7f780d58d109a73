"""Find the sizes and thresholds that suit a GPU: the kernels of all_reduce by themselves, several ranks in one grid.

    python benchmarks/gpu_sweep.py [--json FILE]

First the shape of the arena (ringcomm/devices/cuda.py), one number changed at a time, by what part of the speed of a
copy the ring reaches; then each kernel at each size, by its time, for the ladder of ringcomm/transports/cuda/calls.py.
On an H100 that should take 2 minutes. `--emulated` tries the program where there is no GPU; its times mean nothing.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from ringcomm import ArgumentError
from ringcomm.bench.machine import Machine
from ringcomm.bench.virtual import HEAD, Arrays, Row, measure

RANKS = (2, 4, 8)
FACTORS = (0.25, 0.5, 1, 2, 4)
KERNELS = ("ll", "one_shot", "two_shot", "ring_all_reduce")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    arguments = parser.parse_args()
    arrays = Arrays("emulated" if arguments.emulated else "cuda", ROUNDS)
    large, ladder = (1 << 16, [1 << 8, 1 << 12]) if arguments.emulated else (1 << 26, [256 << 2 * i for i in range(8)])

    copy = arrays.copy()
    machine, found = Machine.here(), []
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; a copy: {copy / 1e9:.1f} GB/s")
    print(f"{'':<32} {HEAD}")
    try:
        for words, row in chain(shapes(arrays, large, copy), kernels(arrays, ladder, copy)):
            print(f"{words:<32} {row}", flush=True)
            found.append({"shape": words, **asdict(row)})
    finally:  # also when it is interrupted
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": asdict(machine), "rows": found}, indent=1) + "\n")


def shapes(arrays: Arrays, size: int, copy: float) -> Iterator[tuple[str, Row]]:
    """Yield what is changed, and the time of the ring."""
    device = arrays.device
    shape, threads = device.shape, device.threads
    changed: list[tuple[str, Any, int]] = [("as it is", shape, threads)]
    for name in ("channels", "slot_bytes"):
        for factor in FACTORS:
            if factor != 1:
                number = int(getattr(shape, name) * factor)
                changed.append((f"{name} {number:,}", shape._replace(**{name: number}), threads))
    for factor in (2, 4):  # as much memory as it is
        wider = shape._replace(channels=shape.channels * factor, slot_bytes=shape.slot_bytes // factor)
        changed.append((f"channels {wider.channels}, slot_bytes {wider.slot_bytes:,}", wider, threads))
    changed += [(f"threads {count}", shape, count) for count in (threads // 4, threads // 2) if count]
    for words, device.shape, device.threads in changed:
        for ranks in RANKS:
            try:
                yield words, measure(arrays, ranks, size, copy, "ring_all_reduce")
            except ArgumentError:  # more blocks than run at once
                continue
    device.shape, device.threads = shape, threads


def kernels(arrays: Arrays, sizes: list[int], copy: float) -> Iterator[tuple[str, Row]]:
    for ranks in RANKS:
        for size in sizes:
            for kernel in KERNELS:
                if kernel != "ll" or size <= arrays.device.shape.line_bytes:
                    yield "", measure(arrays, ranks, size, copy, kernel)


if __name__ == "__main__":
    main()
