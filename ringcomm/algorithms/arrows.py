"""What moves in a schedule, when, and between whom: the arrows of its drawing."""

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np

from ringcomm.algorithms.lockstep import Memory, places
from ringcomm.algorithms.schedule import Algorithm, Copy, Lengths, even, record
from ringcomm.algorithms.waves import Course, Numbers

__all__ = ["Arrow", "arrows", "runs"]

LENGTH = 8192  # elements at least: a chain makes several pieces of that


class Arrow(NamedTuple):
    """A transfer. The blocks are those into which the algorithm cuts the array anywhere, wherever they lie by then."""

    wave: int
    sender: int
    receiver: int
    reduced: bool  # what comes is combined with what the receiver has
    blocks: tuple[int, ...]


def arrows(algorithm: Algorithm, size: int) -> list[Arrow]:
    """Return all transfers on `size` ranks, wave by wave; the root is rank 0."""
    unit = size << size.bit_length()  # which divides evenly by the ranks and by the powers of two within them
    lengths = Lengths(even(-(-LENGTH // unit) * unit, size))
    found = [(head, runs(elements)) for head, elements in transfers(algorithm, lengths)]
    edges = {edge for _, moved in found for run in moved for edge in (run.start, run.stop)}
    number = {edge: index for index, edge in enumerate(sorted(edges | {0}))}  # also where the first block stays

    def blocks(moved: list[range]) -> tuple[int, ...]:
        return tuple(chain(*(range(number[run.start], number[run.stop]) for run in moved)))

    return [Arrow(*head, blocks(moved)) for head, moved in found]


def transfers(algorithm: Algorithm, lengths: Lengths) -> Iterator[tuple[tuple[int, int, int, bool], Numbers]]:
    """Yield the first four of an Arrow, and which elements of the array move."""
    ranks = range(len(lengths.rows))
    schedules = [record(algorithm, rank, len(ranks), lengths) for rank in ranks]
    memories = []  # of numbers that say which element would lie there
    for rank in ranks:
        place = places(algorithm.collective, rank, lengths, root=0)
        first = place.target if algorithm.collective in ("gather", "all_gather") else 0
        given = np.arange(first, first + place.given)
        memories.append(Memory(place, schedules[rank].scratch, given, lambda count: np.zeros(count, int)))

    for number, wave in enumerate(Course.of(schedules).waves()):
        arrived = []
        for sender, receiver in zip(wave.senders.tolist(), wave.receivers.tolist(), strict=True):
            there, here = (schedules[rank].steps[wave.step[rank]] for rank in (sender, receiver))
            elements = memories[sender].read(there.outgoing)
            arrived.append((memories[receiver], here.incoming, elements))
            yield (number, sender, receiver, here.operand is not None), elements
        for memory, block, elements in arrived:
            memory.write(block, elements)
        for rank in wave.done:
            following = schedules[rank].steps[wave.step[rank] + 1 :]
            for copy in takewhile(lambda step: isinstance(step, Copy), following):
                memories[rank].write(copy.target, memories[rank].read(copy.source))


def runs(numbers: Sequence[int] | Numbers) -> list[range]:
    """Divide numbers into runs in which each follows on the one before."""
    values = np.asarray(numbers, np.int64)
    parts = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
