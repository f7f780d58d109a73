"""`ringcomm tune --device`: up to how many bytes each kernel for small arrays is the fastest on this GPU.

The kernels run alone, all ranks in one grid: no link is measured.
"""

from pathlib import Path

import ringcomm
from ringcomm import RingcommError
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.kernels.fresh import VirtualCase
from ringcomm.bench.kernels.virtual import measure
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import require_gpu
from ringcomm.bench.tuning.crossover import cuts
from ringcomm.devices.limits import LADDERS
from ringcomm.machine import tuning
from ringcomm.transports.cuda.virtual import VirtualRanks

__all__ = ["RANKS", "tune_gpu"]

RANKS = (2, 4, 8)
SIZES = {"cuda": [256 << i for i in range(15)], "emulated": [64 << 2 * i for i in range(4)]}  # bytes
ITEM = 4  # bytes of a float32


def tune_gpu(path: Path, device: str, counts: tuple[int, ...], rounds: int) -> None:
    """Measure, print and write the limits for each number of ranks."""
    if device == "cuda":
        require_gpu()
    arrays = DeviceArrays(device, rounds)
    gpu, copy = arrays.device.gpu.name, arrays.copy()
    print(f"# {gpu}; float32; times in us")
    found: dict[int, dict[str, int]] = {}
    for ranks in counts:
        group = VirtualRanks(arrays.device, ranks)
        found[ranks] = {}
        for collective, kernels in LADDERS.items():
            times = [_time(arrays, group, collective, kernel, SIZES[device], copy) for kernel in kernels]
            limits = _limits(kernels, SIZES[device], times)
            found[ranks] |= limits
            print(f"\n{collective}, {ranks} ranks: {', '.join(f'{name} = {limit}' for name, limit in limits.items())}")
            print("".join(f"{cell:>24}" for cell in ("bytes", *kernels)))
            for size, *row in zip(SIZES[device], *times, strict=True):
                print("".join(f"{cell:>24}" for cell in (size, *(f"{1e6 * t:.2f}" for t in row))), flush=True)
    for ranks, settings in found.items():
        facts = {"date": Machine.here().date, "ringcomm": ringcomm.__version__}
        tuning.write(path, settings, facts, tuning.gpu_name(gpu, ranks))


def _time(
    arrays: DeviceArrays, group: VirtualRanks, collective: str, kernel: str, sizes: list[int], copy: float
) -> list[float]:
    """Return the seconds of a kernel for an array, or a block, of each size."""
    rows = [measure(arrays, group, VirtualCase(collective, group.size, s // ITEM, kernel=kernel), copy) for s in sizes]
    if any(row.wrong for row in rows):
        raise RingcommError(f"{kernel}: {sum(row.wrong for row in rows)} elements of {group.size} ranks are wrong")
    return [row.seconds for row in rows]


def _limits(kernels: tuple[str, ...], sizes: list[int], times: list[list[float]]) -> dict[str, int]:
    """Return the last size of each kernel but the last one; 0: it is the fastest nowhere."""
    begin, limits = 0, {}
    for kernel, end in zip(kernels, cuts(times), strict=False):
        limits[kernel] = sizes[end - 1] if end > begin else 0
        begin = end
    return limits
