"""Find the sizes of the arena for a GPU: the ring of all_reduce alone, several ranks in one grid.

    python benchmarks/gpu_sweep.py [--json FILE]

The shape of the arena (ringcomm/devices/cuda.py), one number changed at a time: the ring's fraction of the speed of a
copy. `ringcomm tune --device cuda` measures up to how many bytes the other kernels are faster. `--emulated` tests the
program without a GPU; its times mean nothing.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH

from ringcomm import ArgumentError
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.kernels.fresh import VirtualCase
from ringcomm.bench.kernels.virtual import HEAD, VirtualRow, measure
from ringcomm.bench.machine import Machine
from ringcomm.bench.report import write_json
from ringcomm.devices.contract import Shape
from ringcomm.transports.cuda.virtual import VirtualRanks

RANKS = (2, 4, 8)
FACTORS = (0.25, 0.5, 1, 2, 4)
ROUNDS = 5
LEAST_SLOTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    arguments = parser.parse_args()
    arrays = DeviceArrays("emulated" if arguments.emulated else "cuda", ROUNDS)

    copy = arrays.copy()
    machine, found = Machine.here(), []
    print(f"# {', '.join(machine.gpus) or machine.cpu}, {machine.date}; a copy: {copy / 1e9:.1f} GB/s")
    print(f"{'':<32} {HEAD}")
    try:
        for change, row in shapes(arrays, 1 << (16 if arguments.emulated else 26), copy):
            print(f"{change:<32} {row}", flush=True)
            found.append({"shape": change, **asdict(row)})
    finally:  # also when interrupted
        if arguments.json:
            write_json(arguments.json, {"machine": asdict(machine), "rows": found})


def shapes(arrays: DeviceArrays, size: int, copy: float) -> Iterator[tuple[str, VirtualRow]]:
    """Yield each change, and the time of the ring."""
    device = arrays.device
    usual = device.threads
    for ranks in RANKS:
        for change, shape, threads in changes(device.shape_for(ranks, device.gpu.multiprocessors), usual):
            device.threads = threads
            try:
                case = VirtualCase("all_reduce", ranks, size // 4, kernel="ring_all_reduce")
                yield change, measure(arrays, VirtualRanks(device, ranks, shape=shape), case, copy)
            except ArgumentError:  # more blocks than can run concurrently
                continue
    device.threads = usual


def changes(shape: Shape, threads: int) -> Iterator[tuple[str, Shape, int]]:
    yield "unchanged", shape, threads
    for name in ("channels", "slots", "slot_bytes"):
        for factor in FACTORS:
            number = int(getattr(shape, name) * factor)
            if factor != 1 and (name != "slots" or number >= LEAST_SLOTS):
                yield f"{name} {number:,}", shape._replace(**{name: number}), threads
    for factor in (2, 4):  # the same memory
        wider = shape._replace(channels=shape.channels * factor, slot_bytes=shape.slot_bytes // factor)
        yield f"channels {wider.channels}, slot_bytes {wider.slot_bytes:,}", wider, threads
    for count in (threads // 4, threads // 2):
        if count:
            yield f"threads {count}", shape, count


if __name__ == "__main__":
    main()
