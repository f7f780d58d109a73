"""`ringcomm bench`: start the ranks, run one collective at every size, print and keep the results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ringcomm
from ringcomm import Communicator
from ringcomm.bench.collectives import COLLECTIVES, REDUCTIONS, Setting, count_wrong, fill
from ringcomm.bench.measure import Memcpy, measure_memcpy, time_rounds
from ringcomm.bench.report import Machine, Measurement, header, progress, row, write_json

__all__ = ["add_arguments", "run"]

Array = npt.NDArray[Any]

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Plan:
    """What all ranks must know."""

    collective: str
    sizes: list[int]  # bytes of the larger of input and output, as nccl-tests counts
    dtype: np.dtype[Any]
    op: str
    root: int
    in_place: bool
    symmetric: bool
    warmups: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", choices=COLLECTIVES)
    add("-n", "--ranks", type=whole(1), default=2, help="number of ranks, each a process (default: 2)")
    add("-b", "--begin", type=parse_bytes, default="4", metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=parse_bytes, default="256M", metavar="BYTES", help="last size (default: 256M)")
    add("-f", "--factor", type=whole(2), default=4, help="from each size to the next (default: 4)")
    add("-w", "--warmups", type=whole(0), default=20, help="calls before the clock runs (default: 20)")
    add("--dtype", type=parse_dtype, default="float32", help="default: float32")
    add("--op", choices=REDUCTIONS, default="sum", help="default: sum")
    add("--root", type=whole(0), default=0, help="default: 0")
    add("--out-of-place", action="store_true", help="default: in place, where the collective has such a form")
    add("--symmetric", action="store_true", help="buffers from comm.empty(), which peers access directly")
    add("--json", type=Path, metavar="FILE", help="write the results there as well")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark as the command line says; return 1 if any element was wrong."""
    collective = COLLECTIVES[arguments.collective]
    plan = Plan(
        collective=arguments.collective,
        sizes=list(sizes(arguments.begin, arguments.end, arguments.factor)),
        dtype=arguments.dtype,
        op=arguments.op,
        root=arguments.root,
        in_place=collective.in_place and not (arguments.out_of_place and collective.out_of_place),
        symmetric=arguments.symmetric,
        warmups=arguments.warmups,
    )
    machine = Machine.here()
    memcpy, rows = ringcomm.launch(run_rank, arguments.ranks, args=(plan, machine))[0]
    if arguments.json:
        facts = {"ranks": arguments.ranks, "in_place": plan.in_place, "symmetric": plan.symmetric}
        facts["memcpy"] = memcpy._asdict()
        write_json(arguments.json, machine, facts, rows)
    return int(any(m.wrong for m in rows))


def run_rank(comm: Communicator, plan: Plan, machine: Machine) -> tuple[Memcpy, list[Measurement]]:
    """Run the benchmark as one rank. Rank 0 prints; every rank returns the same."""
    speaks = comm.rank == 0
    binding = pin(comm)
    memcpy = measure_memcpy(comm, machine.cores)
    if speaks:
        facts = [
            f"{plan.collective}, {comm.size} ranks, {binding}; "
            f"{'in place' if plan.in_place else 'out of place'}{', symmetric buffers' if plan.symmetric else ''}",
            f"memcpy: {memcpy.speed / 1e9:.1f} GB/s per core ({memcpy.bytes >> 20} MiB, all ranks at once)",
        ]
        print(header(machine, facts), flush=True)
    bench = Bench(comm, plan)
    rows = []
    counts = bench.counts()
    for i, count in enumerate(counts):
        if speaks:
            progress(i, len(counts), f"{i + 1} of {len(counts)} sizes")
        rows.append(bench.measure(count))
        if speaks:
            progress(len(counts), len(counts), "")
            print(row(rows[-1]), flush=True)
    return memcpy, rows


class Bench:
    """One rank's buffers, large enough for every size, and what is done with them."""

    def __init__(self, comm: Communicator, plan: Plan) -> None:
        self.comm = comm
        self.plan = plan
        self.dtype = plan.dtype
        self.collective = collective = COLLECTIVES[plan.collective]
        self.sends, self.receives = collective.sends(comm.size), collective.receives(comm.size)
        largest = max(self.counts())
        self.source = self.allocate(largest * max(self.sends, self.receives if plan.in_place else 0))
        self.target = None if plan.in_place else self.allocate(largest * self.receives)

    def allocate(self, count: int) -> Array:
        if not self.plan.symmetric:
            return np.empty(count, self.dtype)
        buffer: Array = self.comm.empty((count,), self.dtype)
        return buffer

    def counts(self) -> list[int]:
        """Return the elements per block for the sizes of the plan, each once."""
        blocks = max(self.sends, self.receives)
        if not blocks:
            return [0]
        return list(dict.fromkeys(max(1, size // blocks // self.dtype.itemsize) for size in self.plan.sizes))

    def measure(self, count: int) -> Measurement:
        comm, plan, collective = self.comm, self.plan, self.collective
        setting = Setting(comm.rank, comm.size, count, self.dtype, plan.op, plan.root)
        source, target = self.buffers(count)
        call = collective.prepare(comm, setting, source, target)

        fill(source, setting)  # memory never written to would be one page of zeros, read from the cache
        seconds = time_rounds(comm, call, plan.warmups)

        fill(source, setting)
        call()
        wrong = np.array([count_wrong(source if target is None else target, collective.expected(setting))])
        comm.all_reduce(wrong)

        size = count * max(self.sends, self.receives) * self.dtype.itemsize
        median, p90, p99 = (float(p) for p in np.percentile(seconds, (50, 90, 99)))
        return Measurement(
            library="ringcomm",
            collective=plan.collective,
            bytes=size,
            count=count,
            dtype=plan.dtype.name,
            op=plan.op if collective.reduces else None,
            root=plan.root if collective.rooted else None,
            seconds_median=median,
            seconds_p90=p90,
            seconds_p99=p99,
            algbw=size / median,
            busbw=size / median * collective.bus_factor(comm.size),
            wrong=int(wrong[0]),
        )

    def buffers(self, count: int) -> tuple[Array, Array | None]:
        """Return input and output for blocks of `count` elements; no output: the result replaces the input."""
        source = self.blocks(self.source, count, self.sends)
        if self.target is not None:
            return source, self.blocks(self.target, count, self.receives)
        if self.sends == self.receives:
            return source, None
        # As NCCL defines in place: the smaller array is this rank's block of the larger one.
        whole = self.blocks(self.source, count, self.comm.size)
        mine = whole[self.comm.rank]
        return (whole, mine) if self.sends > self.receives else (mine, whole)

    @staticmethod
    def blocks(buffer: Array, count: int, blocks: int) -> Array:
        return buffer[:count] if blocks == 1 else buffer[: count * blocks].reshape(blocks, count)


def pin(comm: Communicator) -> str:
    """Bind every rank to a core, in turn if there are fewer, and say so: where they wander, every run is another."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    return "each bound to a core of its own" if comm.size <= len(cores) else f"bound to {len(cores)} cores in turn"


def sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    if begin > end:
        raise ringcomm.ArgumentError(f"no size from {begin} to {end} bytes")
    while begin <= end:
        yield begin
        begin *= factor


def whole(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return parse


def parse_bytes(text: str) -> int:
    """Read 64, 64K, 64M or 64G."""
    number, suffix = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: a size ends with a digit, K, M or G")
    return whole(1)(number) * SUFFIXES[suffix]


def parse_dtype(name: str) -> np.dtype[Any]:
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 and the float8s by name once this is imported
    try:
        return np.dtype(name)
    except TypeError:
        message = f"NumPy knows no {name}; bfloat16 and float8 need: pip install ml_dtypes"
        raise argparse.ArgumentTypeError(message) from None
