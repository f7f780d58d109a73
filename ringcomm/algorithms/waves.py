"""All ranks together: which of their steps meet, wave by wave."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringcomm.algorithms.schedule import NOBODY, Copy, Schedule, Step

__all__ = ["Course", "Numbers", "Wave"]

Numbers = npt.NDArray[np.int64]


class Wave(NamedTuple):
    """Transfers whose two ranks are there by now, and what follows."""

    senders: Numbers
    receivers: Numbers
    length: Numbers  # of what each receiver gets
    reduced: Numbers  # elements of it that are combined with others
    step: Numbers  # that each rank is in
    done: Numbers  # the ranks whose step is over with this wave
    copied: Numbers  # elements that each of them copies before it comes to its next exchange


class Course(NamedTuple):
    """What all ranks do: arrays [rank, step]. Beyond its last step a rank does nothing."""

    dest: Numbers
    source: Numbers
    length: Numbers  # of what comes
    reduced: Numbers
    copied: Numbers
    steps: Numbers  # [rank]: how many it does

    @staticmethod
    def of(schedules: Iterable[Schedule]) -> "Course":
        """Return the course of ranks that do this, all of them in order."""
        ranks = [np.array([*map(row, schedule.steps)], np.int64).reshape(-1, 5) for schedule in schedules]
        steps = np.array([len(rows) for rows in ranks])
        table = np.zeros((5, len(ranks), steps.max() + 1), np.int64)
        table[:2] = NOBODY
        for rank, rows in enumerate(ranks):
            table[:, rank, : len(rows)] = rows.T
        dest, source, length, reduced, copied = table
        return Course(dest, source, length, reduced, copied, steps)

    def waves(self) -> Iterator[Wave]:
        """Yield the waves. In the first one nobody meets: the ranks come to their first exchange.

        A transfer goes on as soon as both ranks are there; nothing is sent to a rank that has not asked for it.
        """
        ranks = np.arange(len(self.steps))
        step = np.full_like(ranks, -1)
        dest, source = np.full((2, len(ranks)), NOBODY)  # of the halves of each rank's step that have not begun
        done = ranks
        while len(done):
            receivers = np.flatnonzero((source != NOBODY) & (dest[source] == ranks))
            senders, at = source[receivers], (receivers, step[receivers])
            dest[senders] = source[receivers] = NOBODY
            done = ranks[(dest == NOBODY) & (source == NOBODY) & (step < self.steps)]
            before, copied = step.copy(), np.zeros_like(done)
            moving = np.ones(len(done), bool)
            while moving.any():  # to the next exchange
                step[done[moving]] += 1
                copied += moving * self.copied[done, step[done]]
                moving &= self.copied[done, step[done]] > 0
            dest[done], source[done] = self.dest[done, step[done]], self.source[done, step[done]]
            yield Wave(senders, receivers, self.length[at], self.reduced[at], before, done, copied)
        assert (step == self.steps).all(), "the ranks wait for each other"


def row(step: Step) -> tuple[int, int, int, int, int]:
    if isinstance(step, Copy):
        return NOBODY, NOBODY, 0, 0, step.source.length
    dest, _, source, incoming, operand = step
    length = incoming.end - incoming.begin
    return dest, source, length, 0 if operand is None else length, 0
