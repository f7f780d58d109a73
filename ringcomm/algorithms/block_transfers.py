"""The transfers of a schedule, and the blocks that each one moves, for drawing."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ringcomm.algorithms.lockstep import RankMemory, Transfer, call_layout, execute
from ringcomm.algorithms.schedule import Algorithm, Lengths, even, record
from ringcomm.types import COLLECTIVES

__all__ = ["BlockTransfer", "block_transfers", "runs"]

LENGTH = 8192  # elements at least: a chain divides them into several pieces


class BlockTransfer(NamedTuple):
    """A transfer of some of the blocks into which the algorithm divides the array, wherever they are in memory."""

    wave: int
    sender: int
    receiver: int
    reduced: bool  # the receiver reduces it into its own data
    blocks: tuple[int, ...]


def block_transfers(algorithm: Algorithm, size: int) -> list[BlockTransfer]:
    """Return all transfers on `size` ranks, wave by wave; the root is rank 0."""
    unit = size << size.bit_length()  # divisible by the ranks and by the powers of two up to them
    lengths = Lengths(even(-(-LENGTH // unit) * unit, size))
    schedules = [record(algorithm, rank, size, lengths) for rank in range(size)]
    memories = []  # of element indices in place of data
    for rank, schedule in enumerate(schedules):
        layout = call_layout(algorithm.collective, rank, lengths, root=0)
        first = layout.target if COLLECTIVES[algorithm.collective].given == "BLOCK" else 0
        indices = np.arange(first, first + layout.in_length)
        memories.append(RankMemory(layout, schedule.scratch, indices, lambda count: np.zeros(count, int)))
    found: list[Transfer] = []
    either = lambda one, other: one  # noqa: E731 (a sum of elements of one index)
    execute(schedules, memories, either, lambda each: found.append(each._replace(elements=runs(each.elements))))
    edges = {edge for each in found for run in each.elements for edge in (run.start, run.stop)}
    number = {edge: index for index, edge in enumerate(sorted(edges | {0}))}  # 0: the first block may not move

    def blocks(moved: list[range]) -> tuple[int, ...]:
        return tuple(chain(*(range(number[run.start], number[run.stop]) for run in moved)))

    return [BlockTransfer(*each[:-1], blocks(each.elements)) for each in found]


def runs(numbers: Sequence[int]) -> list[range]:
    """Divide numbers into runs of consecutive numbers."""
    values = np.asarray(numbers, int)
    parts = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
