"""`ringcomm algorithms`: the path of each collective at each size on this machine, and the algorithms between hosts."""

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ringcomm.algorithms.page import COLUMNS, table
from ringcomm.communicator import Communicator
from ringcomm.config import Config, tuning_file
from ringcomm.errors import refuse
from ringcomm.launcher.launch import launch
from ringcomm.machine import tuning
from ringcomm.machine.memory import available, mib
from ringcomm.options import readable, whole
from ringcomm.types import COLLECTIVES, PUBLIC

__all__ = ["PATHS", "add_arguments", "run"]

LARGEST = 64 << 20  # less where memory is short, down to
LEAST_LARGEST = 1 << 20
SIZES = [4 << i for i in range(25)]  # 4 B to LARGEST, of the larger array
ARRAYS = 4  # of the largest size, on each rank
RANK_BYTES = 64 << 20  # about what a rank needs besides, with its part of the arena

PATHS = {
    "single": "one rank: nothing to communicate",
    "staged": "each rank copies its block into its staging buffer and the readers copy it out: two copies, one "
    "synchronization up to segment_bytes = {segment_bytes}, a pipeline of chunks beyond",
    "one-shot": "every rank stages its whole array and reads all of them: one synchronization, n S bytes per rank; "
    "all_reduce and reduce up to one_shot_bytes = {one_shot_bytes}",
    "tree": "many ranks pass their data on to the root of a tree of caches, which makes the result: small all_reduce, "
    "all_gather and barrier; one-shot where a rank is late",
    "two-stage": "reduce-scatter, then all-gather: rank j reduces part j; (5 - 2/n) S bytes per rank, pipelined in "
    "chunks of at most 2 x segment_bytes",
    "symmetric": "buffers of comm.empty(): ranks read and write each other's buffers, without staging; 2 S bytes per "
    "rank in an all_reduce; from direct_bytes = {direct_bytes} on",
    "threads": "ranks of one process read and write each other's arrays; from direct_bytes = {direct_bytes} on",
    "cma": "cross-memory attach: the kernel copies from the memory of the other process, one copy; from cma_bytes = "
    "{cma_bytes} on (None: large blocks in huge pages)",
}


class TracedCall(NamedTuple):
    """A collective at one size, and the path it took."""

    collective: str
    memory: str
    size: int
    path: str
    chunks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=whole(1), default=2, metavar="N", help="number of ranks (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    config = Config()  # an invalid setting is refused before anything is printed
    ranks, largest = arguments.ranks, affordable(arguments.ranks)
    calls: list[TracedCall] = launch(call_all, ranks, args=(largest,))[0]
    print(f"{tuning.machine_name()}; {ranks} ranks, {thresholds()}; sizes are those of the larger array")
    if largest < LARGEST:
        print(f"sizes end at {readable(largest)}: memory is too short for larger arrays on {ranks} ranks")
    print(f"\n{'collective':<16}{'buffers':<11}{'from':>10}{'to':>10}  path")
    for (collective, memory, path), group in groupby(calls, key=lambda call: (call.collective, call.memory, call.path)):
        first, *_, last = [*group] * 2
        chunks = f", in up to {last.chunks} chunks" if last.chunks > 1 else ""
        print(f"{collective:<16}{memory:<11}{readable(first.size):>10}{readable(last.size):>10}  {path}{chunks}")
    values = {name: getattr(config, name) for name in tuning.TUNABLE}
    shown = {name: "never" if value == tuning.NEVER else value for name, value in values.items()}
    print()
    for path in dict.fromkeys(call.path for call in calls):
        print(f"{path}: {PATHS[path].format(**shown)}.")
    print(
        "\nBetween hosts the path is the cheapest algorithm, for n ranks and S elements (times: `ringcomm simulate`):\n"
    )
    for collective, name, exchanges, sent, _, needs in (COLUMNS, *table()):
        print(f"{collective:<16}{name:<20}{exchanges:<50}{sent:<38}{needs}".rstrip())
    return 0


def affordable(ranks: int) -> int:
    """Return the largest size at which the arrays of all ranks fit into memory; raise ArgumentError if none does."""
    memory = available()
    if ranks > (most := memory.bytes // RANK_BYTES):
        need = f"as this runs them, in {mib(RANK_BYTES)} each, and {mib(memory.bytes)} are available ({memory.limit})"
        raise refuse("--ranks", f"at most {most}, {need}", ranks)
    room = memory.bytes - ranks * RANK_BYTES
    largest = LARGEST
    while largest > LEAST_LARGEST and ranks * ARRAYS * largest > room:
        largest //= 2
    return largest


def thresholds() -> str:
    path = tuning_file()
    if path and tuning.read(path):
        return f"thresholds of {path}"
    return "built-in thresholds (`ringcomm tune` measures those of this machine)"


def call_all(comm: Communicator, largest: int = LARGEST) -> list[TracedCall]:
    """Call every collective at every size, on private and on symmetric buffers."""
    buffers = {
        "private": [np.ones(largest, np.uint8) for _ in range(2)],
        "symmetric": [comm.empty((largest,), np.uint8) for _ in range(2)],
    }
    return [
        call
        for collective in PUBLIC
        if COLLECTIVES[collective].moves_data
        for memory, (source, target) in buffers.items()
        for call in call_each_size(comm, collective, memory, source, target)
    ]


def call_each_size(comm: Communicator, collective: str, memory: str, source: Any, target: Any) -> Iterator[TracedCall]:
    """Call a collective at each size: in place on an array of one shape, else from `source` into `target`."""
    row = COLLECTIVES[collective]
    call = getattr(comm, collective)
    options = {"op": "max"} if row.reduces else {}
    for size in (size for size in SIZES if size <= source.nbytes):
        block = max(1, size // 4 // comm.size)
        whole, out = (
            array.view(np.float32)[: block * comm.size].reshape(comm.size, block) for array in (source, target)
        )
        if row.given == "ARRAY":
            call(source.view(np.float32)[: max(1, size // 4)], **options)
        else:
            x = whole if row.given == "BLOCKS" else whole[0]
            call(x if row.gives(comm.rank, 0) else None, out=out if row.got == "BLOCKS" else out[0], **options)
        yield TracedCall(collective, memory, size, *comm._transport.path())
