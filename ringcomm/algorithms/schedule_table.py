"""The schedules of all ranks as arrays, and the transfers that can run together, wave by wave."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringcomm.algorithms.schedule import NO_PEER, Copy, Schedule, Step

__all__ = ["ScheduleTable", "Wave"]

Numbers = npt.NDArray[np.int64]


class Wave(NamedTuple):
    """Transfers whose two ranks are both ready, and the steps that they complete."""

    senders: Numbers
    receivers: Numbers
    length: Numbers  # of each transfer
    reduced: Numbers  # elements of it that the receiver reduces
    done: Numbers  # ranks whose step this wave completes
    copied: Numbers  # elements that each of them copies before its next exchange


class ScheduleTable:
    """The steps of all ranks as arrays [rank, step], padded with empty steps."""

    def __init__(self, schedules: Iterable[Schedule]) -> None:
        ranks = [np.array([*map(row, schedule.steps)], np.int64).reshape(-1, 5) for schedule in schedules]
        self.steps = np.array([len(rows) for rows in ranks])  # of each rank
        table = np.zeros((5, len(ranks), self.steps.max() + 1), np.int64)
        table[:2] = NO_PEER
        for rank, rows in enumerate(ranks):
            table[:, rank, : len(rows)] = rows.T
        self.dest, self.source, self.length, self.reduced, self.copied = table

    def waves(self) -> Iterator[Wave]:
        """Yield the waves. The first has no transfers: the ranks advance to their first exchange.

        A transfer runs as soon as both ranks are ready; nothing is buffered. Raise AssertionError on a deadlock.
        """
        ranks = np.arange(len(self.steps))
        step = np.full_like(ranks, -1)
        dest, source = np.full((2, len(ranks)), NO_PEER)  # of the pending halves of each rank's step
        done = ranks
        while len(done):
            receivers = np.flatnonzero((source != NO_PEER) & (dest[source] == ranks))
            senders, at = source[receivers], (receivers, step[receivers])
            dest[senders] = source[receivers] = NO_PEER
            done = ranks[(dest == NO_PEER) & (source == NO_PEER) & (step < self.steps)]
            copied = np.zeros_like(done)
            moving = np.ones(len(done), bool)
            while moving.any():  # to the next exchange
                step[done[moving]] += 1
                copied += moving * self.copied[done, step[done]]
                moving &= self.copied[done, step[done]] > 0
            dest[done], source[done] = self.dest[done, step[done]], self.source[done, step[done]]
            yield Wave(senders, receivers, self.length[at], self.reduced[at], done, copied)
        waits = [f"rank {rank} (step {step[rank]}) sends to {dest[rank]}" for rank in ranks[dest != NO_PEER]]
        waits += [f"rank {rank} (step {step[rank]}) receives from {source[rank]}" for rank in ranks[source != NO_PEER]]
        if waits:
            raise AssertionError("deadlock: " + ", ".join(waits[:4]) + (" …" if len(waits) > 4 else ""))


def row(step: Step) -> tuple[int, int, int, int, int]:
    if isinstance(step, Copy):
        return NO_PEER, NO_PEER, 0, 0, step.source.length
    dest, _, source, incoming, operand = step
    length = incoming.end - incoming.begin
    return dest, source, length, 0 if operand is None else length, 0
