"""The time of a kernel alone, all ranks on one GPU in one launch.

There is no link between the ranks: this measures how well a kernel uses memory, and nothing of NVLink. `moved` is the
bandwidth of all reads and writes of the kernel, as that of a copy; `of copy` is its share of a plain copy.
"""

from dataclasses import dataclass

from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.kernels.fresh import FreshCheck, VirtualCase
from ringcomm.bench.rank.collectives import COLLECTIVES, dtype_named
from ringcomm.transports.cuda.virtual import VirtualRanks

__all__ = ["HEAD", "VirtualRow", "measure"]

HEAD = "#ranks        bytes               kernel blocks       us/op    busbw      moved  of copy  wrong"
LAUNCHES = 3  # checked, each with new inputs


@dataclass(frozen=True)
class VirtualRow:
    ranks: int
    collective: str
    bytes: int  # of the larger of input and output
    dtype: str
    op: str
    kernel: str
    blocks: int
    seconds: float  # of a launch, median
    wrong: int  # elements, of all checked launches, also beside the outputs
    busbw: float  # bytes per second
    moved: float | None  # bytes per second, as for a copy; None: not known of this kernel
    copy: float

    def __str__(self) -> str:
        moved = ("", "") if self.moved is None else (f"{self.moved / 1e9:.1f}", f"{self.moved / self.copy:.2f}")
        return (
            f"{self.ranks:>5} {self.bytes:>12,} {self.kernel:>20} {self.blocks:>6} {self.seconds * 1e6:>10.1f} "
            f"{self.busbw / 1e9:>8.2f} {moved[0]:>10} {moved[1]:>8} {self.wrong:>6}"
        )


def measure(arrays: DeviceArrays, ranks: VirtualRanks, case: VirtualCase, copy: float) -> VirtualRow:
    """Check a few launches with new inputs, and time others."""
    check = FreshCheck(arrays, ranks, case)
    for _ in range(LAUNCHES):
        check.launch()
    check.found()
    stream = arrays.device.stream()
    seconds = arrays.time(lambda: check.call.launch(stream))
    check.launch()  # the timed launches may have left stale data, too
    found = check.found()
    row, kernel = COLLECTIVES[case.collective], check.call.kernel
    size = case.count * row.blocks(case.size) * dtype_named(case.dtype).itemsize
    copies = moved(kernel, case.size) if case.collective == "all_reduce" and not case.symmetric else None
    return VirtualRow(
        ranks=case.size,
        collective=case.collective,
        bytes=size,
        dtype=case.dtype,
        op=case.op,
        kernel=kernel,
        blocks=check.call.blocks,
        seconds=seconds,
        wrong=found.wrong + found.edge,
        busbw=size / seconds * row.bus_factor(case.size),
        moved=None if copies is None else copies * size / seconds,
        copy=copy,
    )


def moved(kernel: str, n: int) -> float:
    """Return the number of copies of the array that move as many bytes as a kernel of all_reduce on all ranks."""
    adding = (n + 1) / 2  # n arrays to one
    return {
        "ring_all_reduce": 3 * n - 2,  # each rank reads 3 n - 2 segments, and writes as many
        "two_shot": 3 * (n - 1) + adding,  # stages the others' segments, reduces its own, reads theirs
        "one_shot": n * (n - 1 + adding),
        "ll": n * (1.5 * (n - 1) + n),  # its packets are twice as long as their data
    }[kernel]
