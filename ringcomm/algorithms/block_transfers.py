"""The transfers of a schedule, and the blocks that each one moves, for drawing."""

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np

from ringcomm.algorithms.lockstep import RankMemory, call_layout
from ringcomm.algorithms.schedule import Algorithm, Copy, Lengths, even, record
from ringcomm.algorithms.schedule_table import Numbers, ScheduleTable

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
    found = [(head, runs(elements)) for head, elements in transfers(algorithm, lengths)]
    edges = {edge for _, moved in found for run in moved for edge in (run.start, run.stop)}
    number = {edge: index for index, edge in enumerate(sorted(edges | {0}))}  # 0: the first block may not move

    def blocks(moved: list[range]) -> tuple[int, ...]:
        return tuple(chain(*(range(number[run.start], number[run.stop]) for run in moved)))

    return [BlockTransfer(*head, blocks(moved)) for head, moved in found]


def transfers(algorithm: Algorithm, lengths: Lengths) -> Iterator[tuple[tuple[int, int, int, bool], Numbers]]:
    """Yield the first four fields of each BlockTransfer, and the indices of the elements that it moves."""
    ranks = range(len(lengths.counts))
    schedules = [record(algorithm, rank, len(ranks), lengths) for rank in ranks]
    memories = []  # of element indices in place of data
    for rank in ranks:
        layout = call_layout(algorithm.collective, rank, lengths, root=0)
        first = layout.target if algorithm.collective in ("gather", "all_gather") else 0
        indices = np.arange(first, first + layout.in_length)
        memories.append(RankMemory(layout, schedules[rank].scratch, indices, lambda count: np.zeros(count, int)))

    for number, wave in enumerate(ScheduleTable.of(schedules).waves()):
        arrived = []
        for sender, receiver in zip(wave.senders.tolist(), wave.receivers.tolist(), strict=True):
            sent, received = (schedules[rank].steps[wave.step[rank]] for rank in (sender, receiver))
            elements = memories[sender].read(sent.outgoing)
            arrived.append((memories[receiver], received.incoming, elements))
            yield (number, sender, receiver, received.operand is not None), elements
        for memory, block, elements in arrived:
            memory.write(block, elements)
        for rank in wave.done:
            following = schedules[rank].steps[wave.step[rank] + 1 :]
            for copy in takewhile(lambda step: isinstance(step, Copy), following):
                memories[rank].write(copy.target, memories[rank].read(copy.source))


def runs(numbers: Sequence[int] | Numbers) -> list[range]:
    """Divide numbers into runs of consecutive numbers."""
    values = np.asarray(numbers, np.int64)
    parts = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
