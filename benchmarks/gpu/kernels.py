"""Every kernel, several ranks in one grid on one GPU: right or wrong, with new inputs before each launch; and its time.

    python benchmarks/gpu/kernels.py values symmetric dtypes stress speed [--emulated] [--rows FILE]

The exit status is 1 if an element was wrong, or a launch failed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also with PYTHONSAFEPATH

from gpu.rows import Rows
from ringcomm import RingcommError
from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.kernels.fresh import FreshCheck, VirtualCase
from ringcomm.bench.kernels.virtual import measure
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS, dtype_named
from ringcomm.options import several, whole
from ringcomm.transports.cuda.virtual import VirtualRanks
from ringcomm.types import DTYPES, reducible

ALL_REDUCE = ("ll", "one_shot", "two_shot", "ring_all_reduce")
Table = Mapping[str, tuple[str, ...]]

KERNELS: Table = {  # collective → its kernels; "": the only one
    **dict.fromkeys(("gather", "scatter", "all_to_all"), ("",)),
    "all_reduce": ALL_REDUCE,
    "reduce_scatter": ("one_shot_reduce_scatter", "ring_reduce_scatter"),
    "reduce": ("one_shot_reduce", "ring_reduce"),
    "broadcast": ("broadcast", "ring_broadcast"),
    "all_gather": ("all_gather", "ring_all_gather"),
}
SYMMETRIC: Table = {
    "all_reduce": ("ring_all_reduce",),
    "reduce_scatter": ("ring_reduce_scatter",),
    "all_gather": ("ring_all_gather",),
    "all_to_all": ("",),
}
TIMEOUT = 5.0  # seconds of a kernel
MOST = 5_000_000  # elements of all ranks together in a case
ITEM = 4
KIB, MIB = 1 << 10, 1 << 20
SPEED = {  # sizes for which each kernel of all_reduce is timed
    "ll": (4, 256, KIB, 4 * KIB, 8 * KIB),
    "one_shot": (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB),
    "two_shot": (64 * KIB, 256 * KIB, MIB, 2 * MIB),
    "ring_all_reduce": (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}


class Kernels:
    """The checks; each returns whether all was right."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated, self.small, self.sizes = options.emulated, options.small, options.ranks
        self.arrays = DeviceArrays("emulated" if options.emulated else "cuda", rounds=7)
        self.rows = Rows(options.rows)
        self.only = options.only
        self.deadline = time.monotonic() + options.seconds
        self.ranks = cache(lambda size: VirtualRanks(self.arrays.device, size, TIMEOUT))

    def values(self) -> bool:
        return self._cases("values", KERNELS, offsets=(0, 1))

    def symmetric(self) -> bool:
        return self._cases("symmetric", SYMMETRIC, symmetric=True)

    def dtypes(self) -> bool:
        """Check all_reduce of every dtype with every operation, compared bit by bit."""
        counts = {"ll": 15, "one_shot": 200, "ring_all_reduce": 500}
        if not self.emulated:
            counts = {"ll": 100, "one_shot": 1000, "ring_all_reduce": 10_007}
        cases = []
        for dtype in DTYPES:
            try:
                dtype_named(dtype)
            except TypeError:
                self.rows.add(check="dtypes", dtype=dtype, note="skipped: it needs ml_dtypes")
                continue
            for op in REDUCTIONS:
                if reducible(dtype, op, True):
                    cases += [
                        VirtualCase("all_reduce", 4, count, dtype, op, kernel=name) for name, count in counts.items()
                    ]
        return self._check("dtypes", cases, every=lambda case: (case.dtype, case.op))

    def stress(self) -> bool:
        """Launch each kernel 500 times; on a GPU in graphs."""
        launches, replays = (3, 1) if self.emulated else (20, 25)
        right = True
        for collective, kernel in pairs(KERNELS):
            for size in self.sizes:
                for count in self._stressed(kernel):
                    case = VirtualCase(collective, size, count, kernel=kernel)
                    right &= self._check("stress", [case], launches, replays)
        return right

    def _stressed(self, kernel: str) -> tuple[int, ...]:
        if self.emulated:
            return (15,) if kernel == "ll" else (60,)
        return {"ll": (1, 2048), "one_shot": (4096, 16_000), "two_shot": (16_384, 250_001)}.get(kernel, (1000, 100_003))

    def speed(self) -> bool:
        """Time each kernel at several sizes, beside a copy on the same device."""
        copy = self.arrays.copy()
        one = self.arrays.zeros(1, "uint8")
        self.rows.add(check="copy", GBps=round(copy / 1e9, 1))
        self.rows.add(check="empty", us=round(1e6 * self.arrays.time(lambda: one.fill(0)), 2))
        right = True
        for case in self._timed():
            if time.monotonic() > self.deadline:
                self.rows.add(check="speed", note="out of time")
                break
            facts: dict[str, Any] = {"symmetric": True} if case.symmetric else {}
            try:
                row = asdict(measure(self.arrays, self.ranks(case.size), case, copy))
            except RingcommError as error:
                self.rows.add(check="speed", **asdict(case), error=str(error))
                right = False
                continue
            if row["moved"]:
                facts["of_copy"] = round(row["moved"] / copy, 3)
            what = {name: row[name] for name in ("ranks", "collective", "kernel", "bytes", "blocks", "wrong")}
            self.rows.add(check="speed", **what, us=round(1e6 * row["seconds"], 2), **facts)
            right &= not row["wrong"]
        return right

    def _timed(self) -> Iterator[VirtualCase]:
        largest = 4 * KIB if self.emulated else 256 * MIB
        for size in self.sizes:
            for kernel, bytes_ in ((kernel, each) for kernel, those in SPEED.items() for each in those):
                if kernel.startswith(self.only) and bytes_ <= min(
                    largest, self.arrays.device.shape.line_bytes if kernel == "ll" else largest
                ):
                    yield VirtualCase("all_reduce", size, bytes_ // ITEM, kernel=kernel)
            for table, symmetric in () if self.only else ((KERNELS, False), (SYMMETRIC, True)):
                for collective, kernel in pairs(table):
                    for bytes_ in (4 * KIB, MIB, 64 * MIB):
                        if bytes_ <= largest and (symmetric or collective != "all_reduce"):
                            count = bytes_ // ITEM // COLLECTIVES[collective].blocks(size)
                            yield VirtualCase(collective, size, count, kernel=kernel, symmetric=symmetric)

    def _cases(self, name: str, table: Table, offsets: Iterable[int] = (0,), symmetric: bool = False) -> bool:
        counts: tuple[int, ...] = (1, 3, 33, 1000, 1999, 20_000, 100_003, 600_001, 2_000_003)
        counts = (1, 33, 700) if self.emulated else (1, 33, 1999, 70_001) if self.small else counts
        right = True
        for collective, kernel in pairs(table):
            cases = [
                VirtualCase(
                    collective,
                    size,
                    count,
                    root=count % size,
                    kernel=kernel,
                    offset=offset,
                    symmetric=symmetric,
                )
                for size in self.sizes
                for count in counts
                for offset in offsets
                if size * count * COLLECTIVES[collective].blocks(size) <= MOST
                and (kernel != "ll" or count * ITEM <= self.arrays.device.shape.line_bytes)
            ]
            right &= self._check(name, cases)
        return right

    def _check(
        self,
        name: str,
        cases: list[VirtualCase],
        launches: int = 2,
        replays: int = 1,
        every: Callable[[VirtualCase], object] = lambda case: (case.collective, case.kernel),
    ) -> bool:
        """Launch each case, with new inputs each time; add a row for all. One that fails ends its kind."""
        start, wrong, edge, done, problem, failed = time.monotonic(), 0, 0, 0, "", set[object]()
        kernel = ""
        for case in cases:
            if every(case) in failed:
                continue
            done += 1
            try:
                check = FreshCheck(self.arrays, self.ranks(case.size), case)
                kernel = check.call.kernel
                check.launch()  # compiles what computes the inputs: a capture cannot
                check.found()
                repeat = self.arrays.repeated(check.launch, launches) if replays > 1 else None
                for _ in range(replays if repeat else launches - 1):
                    (repeat or check.launch)()
                found = check.found()
            except Exception as error:  # of any kind: the next kernel is checked
                failed.add(every(case))
                problem = problem or f"{shown(case)}: {type(error).__name__}: {error}"
                continue
            wrong, edge = wrong + found.wrong, edge + found.edge
            if found.wrong or found.edge:
                problem = problem or f"{shown(case)}: {found.wrong} wrong, {found.edge} beside the output"
        what: dict[str, Any] = {"collective": cases[0].collective, "kernel": kernel or cases[0].kernel}
        if name == "stress":
            what |= {"ranks": cases[0].size, "count": cases[0].count, "launches": 1 + launches * replays}
        what |= {"cases": done, "wrong": wrong, "edge": edge, "seconds": round(time.monotonic() - start, 2)}
        self.rows.add(check=name, **what, problem=problem)
        return not problem


def pairs(table: Table) -> Iterator[tuple[str, str]]:
    return ((collective, kernel) for collective, kernels in table.items() for kernel in kernels)


def shown(case: VirtualCase) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(case).items() if value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = ("values", "symmetric", "dtypes", "stress", "speed")
    parser.add_argument("checks", nargs="+", choices=checks, metavar="CHECK", help=", ".join(checks))
    parser.add_argument("--emulated", action="store_true", help="on the emulated device: tries this program")
    parser.add_argument("--small", action="store_true", help="few sizes, for compute-sanitizer")
    parser.add_argument("--ranks", type=several(whole(1)), default="2,3,4,8", metavar="N,...", help="numbers of ranks")
    parser.add_argument("--seconds", type=float, default=60, help="start no more timings after so long (default: 60)")
    parser.add_argument("--only", default="", metavar="KERNEL", help="time this kernel of all_reduce only")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also append the rows to FILE, as JSON lines")
    options = parser.parse_args()
    kernels = Kernels(options)
    right = [getattr(kernels, check)() for check in options.checks]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
