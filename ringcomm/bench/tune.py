"""`ringcomm tune`: measure where one way of doing a collective overtakes another on this machine, and remember it.

The ways are ringcomm itself under different settings, and take turns as libraries do in `ringcomm bench`.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import ringcomm
from ringcomm import ArgumentError, RingcommError, tuning
from ringcomm.bench import report
from ringcomm.bench.interrupts import Interrupted, interruptible
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import Contender, run_ringcomm
from ringcomm.bench.plan import Plan, whole
from ringcomm.bench.rounds import Lineup
from ringcomm.config import tuning_file

__all__ = ["add_arguments", "run"]

MOST_RANKS = 8  # the crossovers hardly move beyond
LEAST_ROUNDS = 3  # of fewer, the median would be any disturbance, and be kept
PATIENCE = 60.0

Times = dict[int, list[float]]  # value of the setting → seconds at each size


@dataclass(frozen=True)
class Setting:
    """One setting: the values to compare, at which sizes of an all_reduce, and which value follows from the times."""

    name: str
    values: tuple[int, ...]
    begin: int
    end: int
    choose: Callable[[list[int], Times], int]
    symmetric: bool = False


def fastest(_: list[int], times: Times) -> int:
    """Return the value with the shortest times, all sizes weighing the same."""
    return min(times, key=lambda value: sum(map(math.log, times[value])))


def split(small: list[float], large: list[float]) -> int:
    """Return how many of the sizes should go the way of the small ones, so that all times together are shortest."""
    costs = [sum(map(math.log, small[:k] + large[k:])) for k in range(len(small) + 1)]
    return costs.index(min(costs))


def up_to(sizes: list[int], times: Times) -> int:
    """Return the last size at which the larger value, which sends everything the way of small arrays, is faster."""
    k = split(times[max(times)], times[min(times)])
    return sizes[k - 1] if k else 0


def starting_from(sizes: list[int], times: Times) -> int:
    """Return the first size from which on the smaller value, which sends everything the way of large arrays, is."""
    k = split(times[max(times)], times[min(times)])
    return sizes[k] if k < len(sizes) else tuning.NEVER


# In this order: each is measured with those before it already set.
SETTINGS = (
    Setting("stream_bytes", (1 << 10, tuning.NEVER), 64 << 10, 16 << 20, fastest),
    Setting("segment_bytes", (64 << 10, 128 << 10, 256 << 10, 512 << 10), 1 << 20, 16 << 20, fastest),
    Setting("small_bytes", (0, tuning.NEVER), 1 << 10, 256 << 10, up_to),
    Setting("direct_bytes", (1, tuning.NEVER), 1 << 10, 1 << 20, starting_from, symmetric=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=whole(2), metavar="N", help="default: one for each core, and at least 2")
    parser.add_argument(
        *("-n", "--iters"),
        type=whole(LEAST_ROUNDS),
        default=20,
        metavar="ROUNDS",
        help=f"rounds of each, at least {LEAST_ROUNDS} (default: 20)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write what `ringcomm.init` will then use on this machine."""
    path = tuning_file()
    if path is None:
        raise ArgumentError("RINGCOMM_TUNING is empty: there is no file to write to")
    ranks = arguments.ranks or max(2, min(MOST_RANKS, len(os.sched_getaffinity(0))))
    try:
        with interruptible():
            settings = _settings(ranks, arguments.iters)
    except Interrupted as interrupt:
        report.progress(1, "")
        print(f"ringcomm tune: interrupted: {path} stays as it was", file=sys.stderr)
        return interrupt.status
    tuning.write(path, settings, {"date": Machine.here().date, "ringcomm": ringcomm.__version__, "ranks": ranks})
    print(f"\nwritten to {path}; delete it to go back to the built-in values")
    return 0


def _settings(ranks: int, rounds: int) -> dict[str, int]:
    print(f"# {tuning.machine()}; {ranks} ranks, all_reduce of float32; times in us, rotated and cached")
    settings: dict[str, int] = {}
    for setting in SETTINGS:
        sizes, times = measure(setting, settings, ranks, rounds)
        settings[setting.name] = chosen = setting.choose(sizes, {v: [a * b for a, b in times[v]] for v in times})
        print(f"\n{setting.name} = {words(chosen)}")
        print("".join(f"{cell:>20}" for cell in ("bytes", *(f"{setting.name[:-6]} {words(v)}" for v in times))))
        for i, size in enumerate(sizes):
            cells = [" ".join(f"{seconds * 1e6:.2f}" for seconds in times[value][i]) for value in times]
            print("".join(f"{cell!s:>20}" for cell in (size, *cells)), flush=True)
    return settings


def measure(
    setting: Setting, settled: dict[str, int], ranks: int, rounds: int
) -> tuple[list[int], dict[int, list[tuple[float, float]]]]:
    """Return the sizes, and for each value the seconds with rotated and with cached buffers at each of them."""
    plan = Plan(
        collectives=["all_reduce"],
        ranks=[ranks],
        begin=setting.begin,
        end=setting.end,
        factor=2,
        rounds=rounds,
        warmups=20,
        check=False,
        dtypes=["float32"],
        ops=["sum"],
        root=0,
        in_place=True,
        rotate=True,
        symmetric=setting.symmetric,
        asynchronous=False,
    )
    plan.require(len(setting.values))
    contenders = []
    for value in setting.values:
        given = settled | {setting.name: value}
        environment = {"RINGCOMM_TUNING": ""}  # nothing of an earlier tuning
        environment |= {f"RINGCOMM_{name.upper()}": str(number) for name, number in given.items()}
        contenders.append(Contender(str(value), "ours", sys.executable, run_ringcomm, "RINGCOMM_RANK", environment))
    with ExitStack() as stack:
        lineup = Lineup(plan, ranks, PATIENCE, report.progress)
        lineup.start(contenders, stack)
        rows = [row for size in lineup.measure() for row in size]
        lineup.close()
    report.progress(1, "")
    for failure in lineup.failures:
        raise RingcommError(f"{setting.name} = {failure.library}: {failure.reason}")
    seconds = {(row.library, row.bytes, row.buffers): row.median for row in rows}
    sizes = sorted({row.bytes for row in rows})

    def both(value: int, size: int) -> tuple[float, float]:
        return seconds[str(value), size, "rotated"], seconds[str(value), size, "cached"]

    return sizes, {value: [both(value, size) for size in sizes] for value in setting.values}


def words(number: int) -> str:
    return "never" if number == tuning.NEVER else str(number)
