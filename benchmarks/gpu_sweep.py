"""Find the sizes and thresholds for a GPU: the kernels of all_reduce alone, several ranks in one grid.

    python benchmarks/gpu_sweep.py [--json FILE]

First the shape of the arena (ringcomm/devices/cuda.py), one number changed at a time: the ring's fraction of the speed
of a copy. Then each kernel at each size, for the thresholds of ringcomm/transports/cuda/kernels.py. An H100 should take
2 minutes. `--emulated` tests the program without a GPU; its times mean nothing.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH

from gpu.device_arrays import DeviceArrays
from gpu.fresh import VirtualCase
from gpu.measure import HEAD, VirtualRow, measure
from gpu.virtual import VirtualRanks

from ringcomm import ArgumentError
from ringcomm.bench.machine import Machine
from ringcomm.bench.report import write_json

RANKS = (2, 4, 8)
FACTORS = (0.25, 0.5, 1, 2, 4)
KERNELS = ("ll", "one_shot", "two_shot", "ring_all_reduce")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    arguments = parser.parse_args()
    arrays = DeviceArrays("emulated" if arguments.emulated else "cuda", ROUNDS)
    large, ladder = (1 << 16, [1 << 8, 1 << 12]) if arguments.emulated else (1 << 26, [256 << 2 * i for i in range(8)])

    copy = arrays.copy()
    machine, found = Machine.here(), []
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; a copy: {copy / 1e9:.1f} GB/s")
    print(f"{'':<32} {HEAD}")
    try:
        for change, row in chain(shapes(arrays, large, copy), kernels(arrays, ladder, copy)):
            print(f"{change:<32} {row}", flush=True)
            found.append({"shape": change, **asdict(row)})
    finally:  # also when interrupted
        if arguments.json:
            write_json(arguments.json, {"machine": asdict(machine), "rows": found})


def shapes(arrays: DeviceArrays, size: int, copy: float) -> Iterator[tuple[str, VirtualRow]]:
    """Yield each change, and the time of the ring."""
    device = arrays.device
    shape, threads = device.shape, device.threads
    changed: list[tuple[str, Any, int]] = [("unchanged", shape, threads)]
    for name in ("channels", "slot_bytes"):
        for factor in FACTORS:
            if factor != 1:
                number = int(getattr(shape, name) * factor)
                changed.append((f"{name} {number:,}", shape._replace(**{name: number}), threads))
    for factor in (2, 4):  # the same memory
        wider = shape._replace(channels=shape.channels * factor, slot_bytes=shape.slot_bytes // factor)
        changed.append((f"channels {wider.channels}, slot_bytes {wider.slot_bytes:,}", wider, threads))
    changed += [(f"threads {count}", shape, count) for count in (threads // 4, threads // 2) if count]
    for change, device.shape, device.threads in changed:
        for ranks in RANKS:
            try:
                case = VirtualCase("all_reduce", ranks, size // 4, kernel="ring_all_reduce")
                yield change, measure(arrays, VirtualRanks(device, ranks), case, copy)
            except ArgumentError:  # more blocks than can run concurrently
                continue
    device.shape, device.threads = shape, threads


def kernels(arrays: DeviceArrays, sizes: list[int], copy: float) -> Iterator[tuple[str, VirtualRow]]:
    for ranks in RANKS:
        group = VirtualRanks(arrays.device, ranks)
        for size in sizes:
            for kernel in KERNELS:
                if kernel != "ll" or size <= arrays.device.shape.line_bytes:
                    case = VirtualCase("all_reduce", ranks, size // 4, kernel=kernel)
                    yield "", measure(arrays, group, case, copy)


if __name__ == "__main__":
    main()
