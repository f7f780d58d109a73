"""`ringcomm algorithms`: which way each collective takes at which size on this machine, found by taking it, and why."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ringcomm import tuning
from ringcomm.algorithms.page import COLUMNS, table
from ringcomm.communicator import Communicator
from ringcomm.config import Config, tuning_file
from ringcomm.launch import launch
from ringcomm.memory import available, require

__all__ = ["WAYS", "main"]

LARGEST = 64 << 20  # where memory bears it
LEAST_LARGEST = 1 << 20
SIZES = [4 << i for i in range(25)]  # 4 B to LARGEST, of the larger array
ARRAYS = 4  # of the largest size, on each rank
RANK_BYTES = 64 << 20  # what else a rank takes, with its part of the arena, about

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")

# What the names of the transport stand for.
WAYS = {
    "exchange": "each rank lays its block into its own staging buffer, the readers take it from there: two copies. One "
    "synchronisation if it fits into a chunk (segment_bytes = {segment_bytes}), else a pipeline of chunks",
    "one shot": "each rank lays its array down and every rank reduces all: one synchronisation, n S bytes each; "
    "best while synchronising costs more than reading (up to small_bytes = {small_bytes})",
    "two stages": "reduce-scatter and all-gather in chunks of 2 x segment_bytes: rank j reduces part j, the others "
    "collect it. (5 - 2/n) S bytes per rank; the stages of three chunks overlap",
    "symmetric": "buffers of comm.empty(), from direct_bytes = {direct_bytes} on: ranks read and write each other's "
    "arrays, nothing is staged; 2 S bytes per rank in an all_reduce",
    "reached": "the kernel copies out of the memory of the other process: one copy, from reach_bytes = {reach_bytes} "
    "on (None: large blocks in huge pages). It pays once staging falls out of the caches",
    "threads": "ranks of one process read and write each other's arrays, from direct_bytes = {direct_bytes} on",
    "alone": "one rank: nothing moves",
}


class Step(NamedTuple):
    """What one call did."""

    collective: str
    memory: str
    size: int
    way: str
    chunks: int


def main(ranks: int) -> int:
    """Print the table for so many processes."""
    config = Config()  # refuses what makes no sense before anything is printed
    largest = affordable(ranks)
    steps: list[Step] = launch(walk, ranks, args=(largest,))[0]
    print(f"{tuning.machine()}; {ranks} ranks, {settings()}; sizes are those of the larger array")
    if largest < LARGEST:
        print(f"no sizes beyond {readable(largest)}: the arrays of so many ranks would not fit into memory")
    print()
    print(f"{'collective':<16}{'buffers':<11}{'from':>10}{'to':>10}  way")
    for (collective, memory), mine in groupby(steps, key=lambda step: (step.collective, step.memory)):
        for way, part in groupby(mine, key=lambda step: step.way):
            run = list(part)
            chunks = f", in up to {run[-1].chunks} chunks" if run[-1].chunks > 1 else ""
            print(f"{collective:<16}{memory:<11}{readable(run[0].size):>10}{readable(run[-1].size):>10}  {way}{chunks}")
    values = {name: "never" if value == tuning.NEVER else value for name, value in vars_of(config).items()}
    print()
    for way in dict.fromkeys(step.way for step in steps):
        print(f"{way}: {WAYS[way].format(**values)}.")
    print("\nBetween hosts the cheapest of these, for n ranks and S elements (prices: ringcomm simulate):\n")
    for collective, name, exchanges, sent, _, needs in (COLUMNS, *table()):
        print(f"{collective:<16}{name:<20}{exchanges:<50}{sent:<38}{needs}".rstrip())
    return 0


def affordable(ranks: int) -> int:
    """Return the largest size at which the arrays of so many ranks fit into memory, or raise MemoryShortage."""
    require(ranks * RANK_BYTES, f"{ranks} ranks")
    room = available().bytes - ranks * RANK_BYTES
    largest = LARGEST
    while largest > LEAST_LARGEST and ranks * ARRAYS * largest > room:
        largest //= 2
    return largest


def settings() -> str:
    path = tuning_file()
    tuned = tuning.read(path) if path else {}
    return f"thresholds of {path}" if tuned else "built-in thresholds (`ringcomm tune` measures those of this machine)"


def vars_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("segment_bytes", "reach_bytes", *tuning.TUNABLE)}


def walk(comm: Communicator, largest: int = LARGEST) -> list[Step]:
    """Call every collective at every size, on private and on symmetric buffers."""
    kinds = {
        "private": [np.ones(largest, np.uint8) for _ in range(2)],
        "symmetric": [comm.empty((largest,), np.uint8) for _ in range(2)],
    }
    return [
        step
        for collective in COLLECTIVES
        for memory, (source, target) in kinds.items()
        for step in ladder(comm, collective, memory, source, target)
    ]


def ladder(comm: Communicator, collective: str, memory: str, source: Any, target: Any) -> Iterator[Step]:
    is_root = comm.rank == 0
    for size in (size for size in SIZES if size <= source.nbytes):
        block = max(1, size // 4 // comm.size)
        whole = source.view(np.float32)[: block * comm.size].reshape(comm.size, block)
        out = target.view(np.float32)[: block * comm.size].reshape(comm.size, block)
        x, mine = source.view(np.float32)[: max(1, size // 4)], target.view(np.float32)[:block]
        calls = {
            "all_reduce": partial(comm.all_reduce, x, "max"),
            "reduce": partial(comm.reduce, x, "max"),
            "broadcast": partial(comm.broadcast, x),
            "all_gather": partial(comm.all_gather, whole[0], out),
            "gather": partial(comm.gather, whole[0], out),
            "reduce_scatter": partial(comm.reduce_scatter, whole, "max", mine),
            "scatter": partial(comm.scatter, whole if is_root else None, mine),
            "all_to_all": partial(comm.all_to_all, whole, out),
        }
        calls[collective]()
        yield Step(collective, memory, size, *comm._transport.way())


def readable(size: int) -> str:
    for suffix, unit in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= unit:
            return f"{size // unit} {suffix}"
    return f"{size} B"
