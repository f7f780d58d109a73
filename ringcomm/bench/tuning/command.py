"""`ringcomm tune`: measure the crossovers between the paths of a collective on this machine, or the network; keep them.

ringcomm under each value of a setting is compared with itself, as libraries are in `ringcomm bench`.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ringcomm
from ringcomm import ArgumentError, Communicator, RingcommError
from ringcomm.bench.comparison import Comparison, compare
from ringcomm.bench.interrupts import Interrupted, interruptible
from ringcomm.bench.machine import Machine
from ringcomm.bench.peers import LibrarySpec, run_ringcomm
from ringcomm.bench.sweep import Sweep
from ringcomm.bench.tuning.crossover import cuts
from ringcomm.bench.tuning.gpu import RANKS, tune_gpu
from ringcomm.bench.tuning.network import tune_network
from ringcomm.bench.world import find_world, let_rank_0_speak, run_on_ranks
from ringcomm.config import TUNING, tuning_file
from ringcomm.machine import topology, tuning
from ringcomm.machine.files import check_writable
from ringcomm.options import whole

__all__ = ["add_arguments", "run"]

MOST_RANKS = 8  # the crossovers hardly move beyond
LEAST_ROUNDS = 3  # with fewer, one disturbance would be the median
TIMEOUT = 60.0

Times = dict[int, list[float]]  # value of the setting → seconds at each size


@dataclass(frozen=True)
class TunedSetting:
    """A setting: the values to compare, the sizes of the collective, and the rule that chooses a value."""

    name: str
    values: tuple[int, ...]
    begin: int
    end: int
    choose: Callable[[list[int], Times], int | None]
    symmetric: bool = False
    collective: str = "all_reduce"


def fastest(_: list[int], times: Times) -> int:
    """Return the value with the shortest times; all sizes weigh the same."""
    return min(times, key=lambda value: sum(map(math.log, times[value])))


def up_to(sizes: list[int], times: Times) -> int:
    """Return the last size at which the larger value, the path of small arrays everywhere, is faster."""
    [k] = cuts([times[max(times)], times[min(times)]])
    return sizes[k - 1] if k else 0


def starting_from(sizes: list[int], times: Times) -> int:
    """Return the first size from which on the smaller value, the path of large arrays everywhere, is faster."""
    [k] = cuts([times[max(times)], times[min(times)]])
    return sizes[k] if k < len(sizes) else tuning.NEVER


def from_where_it_pays(sizes: list[int], times: Times) -> int | None:
    """Return the same; None, for the built-in rule, where the path of large arrays is faster at none of the sizes."""
    size = starting_from(sizes, times)
    return None if size == tuning.NEVER else size


# In this order: each is measured with the values chosen before it.
SETTINGS = (
    TunedSetting("segment_bytes", (128 << 10, 256 << 10, 512 << 10), 1 << 20, 16 << 20, fastest),
    TunedSetting("one_shot_bytes", (0, tuning.NEVER), 1 << 10, 256 << 10, up_to),
    TunedSetting("direct_bytes", (1, tuning.NEVER), 1 << 10, 1 << 20, starting_from, symmetric=True),
    # Of arrays below 4 MiB, which NumPy leaves in small pages.
    TunedSetting("cma_bytes", (1, tuning.NEVER), 64 << 10, 2 << 20, from_where_it_pays, collective="all_gather"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    let_rank_0_speak(parser)
    add = parser.add_argument
    network = "latency and bandwidth between the hosts of the job whose launcher has started this command on each rank"
    add("--network", action="store_true", help=network)
    gpus = "cuda: the kernels of this GPU, which all ranks share; emulated: the same on the CPU, to try it"
    add("--device", choices=("host", "cuda", "emulated"), default="host", help=gpus)
    ranks = f"number of ranks (default: one per core, at least 2; on a GPU {', '.join(map(str, RANKS))})"
    add("--ranks", type=whole(2), metavar="N", help=ranks)
    rounds = f"rounds per value, at least {LEAST_ROUNDS} (default: 20)"
    add("-n", "--iters", type=whole(LEAST_ROUNDS), default=20, metavar="ROUNDS", help=rounds)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the thresholds that `ringcomm.init` then uses on this machine."""
    path = tuning_file()
    try:
        with interruptible():
            if arguments.network or find_world():
                with _untuned():
                    return run_on_ranks(lambda comm: _tune_network(comm, path, arguments))
            return _tune_machine(path, arguments)
    except Interrupted as interrupt:
        print(f"ringcomm tune: interrupted: {path} stays as it was", file=sys.stderr)
        return interrupt.status


@contextmanager
def _untuned() -> Iterator[None]:
    """Ignore an earlier tuning, also where its file is named and does not exist yet."""
    named = os.environ.get(TUNING)
    os.environ[TUNING] = ""
    try:
        yield
    finally:
        del os.environ[TUNING]
        if named is not None:
            os.environ[TUNING] = named


def _tune_network(comm: Communicator, path: Path | None, arguments: argparse.Namespace) -> int:
    if not arguments.network:
        raise ArgumentError("a launcher has started this: expected --network, or no launcher for thresholds")
    if arguments.device != "host":
        raise ArgumentError("--device: expected no --network, which measures the links between hosts")
    if arguments.ranks:
        raise ArgumentError("--ranks: expected no --network, which measures the ranks that a launcher has started")
    return tune_network(comm, _require(path, comm.rank == 0), arguments.iters)


def _require(path: Path | None, writes: bool = True) -> Path:
    """Return the file, or raise why this rank, if it `writes`, could not write it once all is measured."""
    if path is None:
        raise ArgumentError("RINGCOMM_TUNING is empty: there is no file to write to")
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    return path


def _tune_machine(path: Path | None, arguments: argparse.Namespace) -> int:
    path = _require(path)
    if arguments.device == "host":
        ranks = arguments.ranks or max(2, min(MOST_RANKS, len(topology.cores())))
        settings = _settings(ranks, arguments.iters)
        tuning.write(path, settings, {"date": Machine.here().date, "ringcomm": ringcomm.__version__, "ranks": ranks})
    else:
        with _untuned():
            tune_gpu(path, arguments.device, (arguments.ranks,) if arguments.ranks else RANKS, arguments.iters)
    print(f"\nwritten to {path}; delete it to return to the built-in values")
    return 0


def _settings(ranks: int, rounds: int) -> dict[str, int]:
    print(f"# {tuning.machine_name()}; {ranks} ranks, float32; times in us, rotated and cached")
    settings: dict[str, int] = {}
    for setting in SETTINGS:
        sizes, times = measure(setting, settings, ranks, rounds)
        chosen = setting.choose(sizes, {v: [a * b for a, b in times[v]] for v in times})
        if chosen is not None:
            settings[setting.name] = chosen
        print(f"\n{setting.name} = {describe_threshold(chosen)}")
        print(
            "".join(
                f"{cell:>20}" for cell in ("bytes", *(f"{setting.name[:-6]} {describe_threshold(v)}" for v in times))
            )
        )
        for i, size in enumerate(sizes):
            cells = [" ".join(f"{seconds * 1e6:.2f}" for seconds in times[value][i]) for value in times]
            print("".join(f"{cell!s:>20}" for cell in (size, *cells)), flush=True)
    return settings


def measure(
    setting: TunedSetting, chosen: dict[str, int], ranks: int, rounds: int
) -> tuple[list[int], dict[int, list[tuple[float, float]]]]:
    """Return the sizes, and for each value the seconds with rotated and with cached buffers at each of them."""
    sweep = Sweep(
        collectives=[setting.collective],
        ranks=[ranks],
        begin=setting.begin,
        end=setting.end,
        factor=2,
        rounds=rounds,
        check=False,
        dtypes=["float32"],
        ops=["sum"],
        symmetric=setting.symmetric,
    )
    sweep.require(len(setting.values))
    libraries = []
    for value in setting.values:
        environment = {TUNING: ""}  # ignore an earlier tuning
        for name, number in (chosen | {setting.name: value}).items():
            environment[f"RINGCOMM_{name.upper()}"] = str(number)
        spec = LibrarySpec(str(value), "ringcomm", sys.executable, run_ringcomm, "RINGCOMM_RANK", environment)
        libraries.append(spec)
    with compare(Comparison.here(sweep, ranks), libraries, TIMEOUT) as comparison:
        rows = [row for size in comparison.measure() for row in size]
    for failure in comparison.failures:
        raise RingcommError(f"{setting.name} = {failure.library}: {failure.reason}")
    seconds = {(row.library, row.bytes, row.buffers): row.median for row in rows}
    sizes = sorted({row.bytes for row in rows})

    def both(value: int, size: int) -> tuple[float, float]:
        return seconds[str(value), size, "rotated"], seconds[str(value), size, "cached"]

    return sizes, {value: [both(value, size) for size in sizes] for value in setting.values}


def describe_threshold(number: int | None) -> str:
    return {None: "as built in", tuning.NEVER: "never"}.get(number, str(number))
