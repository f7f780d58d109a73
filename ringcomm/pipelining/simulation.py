"""What a pipeline schedule does before it runs: whether it trains, its times, and the order of its transfers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringcomm.errors import ArgumentError, refuse
from ringcomm.pipelining.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    P2PTransfer,
    PipelineSchedule,
)

__all__ = ["Span", "Timeline", "simulate", "timeline", "transfers", "validate"]


class Span(NamedTuple):
    """The time an action takes."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule: `spans[rank]` is the rank's row with its times."""

    schedule: PipelineSchedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last action ends."""
        return max(row[-1].end for row in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, divided by their compute time."""
        compute = sum(end - begin for row in self.spans for _, begin, end in row)
        return (self.makespan * len(self.spans) - compute) / compute

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank, the most chunk activations in flight at once."""
        change = {FORWARD: 1, BACKWARD_INPUT: 0}
        rows = ([change.get(action.phase, -1) for action in row] for row in self.schedule.table)
        return tuple(max(accumulate(row)) for row in rows)


def simulate(
    schedule: PipelineSchedule, forward: float = 1, backward: float = 2, weights: float | None = None
) -> Timeline:
    """Return the times of all actions, the same for each stage; transfers take no time.

    Args:
        schedule: the schedule
        forward: time of a chunk's forward
        backward: time of its backward
        weights: the part of that time that is for weights; None: half

    Raises:
        ArgumentError: a time is not positive, or the ranks deadlock; the message has what each rank waits for.
    """
    if not (forward > 0 and backward > 0):
        raise refuse("times of a forward and a backward", "more than 0", (forward, backward))
    weights = backward / 2 if weights is None else weights
    if not 0 < weights < backward:
        raise refuse("time of a backward for weights", f"more than 0 and less than {backward}", weights)
    times = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: backward - weights, BACKWARD_WEIGHT: weights}
    return timeline(schedule, lambda _, phase: times[phase])


def timeline(schedule: PipelineSchedule, time: Callable[[int, str], float], transfer: float = 0) -> Timeline:
    """Return the times of all actions.

    Args:
        schedule: the schedule
        time: (stage, phase) → time of the action
        transfer: time of a transfer between two ranks, which runs beside the computation of both

    Raises:
        ArgumentError: the ranks deadlock; the message has what each rank waits for.
    """
    arrived: dict[P2PTransfer | None, float] = {None: 0}
    spans: list[list[Span]] = [[] for _ in schedule.table]

    def advance(rank: int) -> bool:
        """Run a rank until it waits; return whether it ran."""
        done = spans[rank]
        start = len(done)
        for action in schedule.table[rank][start:]:
            needed = schedule.input_of(rank, action)
            if needed not in arrived:
                break
            begin = max(arrived[needed], done[-1].end if done else 0)
            done.append(Span(action, begin, begin + time(schedule.stage(rank, action.chunk), action.phase)))
            if output := schedule.output_of(rank, action):
                sender, receiver = schedule.endpoints(output)
                arrived[output] = done[-1].end + transfer * (sender != receiver)
        return len(done) > start

    while sum(map(advance, range(schedule.ranks))):
        pass
    waiting = [
        f"rank {rank}: {row[len(done)]} waits for {schedule.input_of(rank, row[len(done)])}"
        for rank, (row, done) in enumerate(zip(schedule.table, spans, strict=True))
        if len(done) < len(row)
    ]
    if waiting:
        raise ArgumentError("\n".join([f"{schedule.name}: the ranks deadlock", *waiting]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def transfers(schedule: PipelineSchedule) -> list[P2PTransfer]:
    """Return the transfers between ranks, in order of simulated time.

    If every rank posts its sends and receives in this order none waits forever, not even if they run one by one, as on
    a CUDA stream: a transfer depends only on earlier ones.
    """
    ready = [
        (end, rank, output)
        for rank, row in enumerate(simulate(schedule).spans)
        for action, _, end in row
        if (output := schedule.output_of(rank, action))
    ]
    return [transfer for _, _, transfer in sorted(ready) if len(set(schedule.endpoints(transfer))) == 2]


def validate(schedule: PipelineSchedule) -> None:
    """Check that a schedule trains a model.

    Every stage runs each micro-batch forward once and later backward once, or backward for inputs and then for weights.
    Gradients of weights are added in the order of the micro-batches, so they have the bits of one process that runs the
    micro-batches one by one. With sends that do not block, no rank waits forever.

    Raises:
        ArgumentError: the schedule does not; the message names the rank and the action.
    """
    if len(schedule.table) != schedule.ranks:
        raise refuse(f"table of {schedule.name}", f"a row for each of {schedule.ranks} ranks", len(schedule.table))
    phases = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if schedule.splits_backward else (FORWARD, BACKWARD)
    expected = Counter(
        Action(phase, micro_batch, chunk)
        for phase in phases
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
    )
    for rank, row in enumerate(schedule.table):
        found = Counter(row)
        for action in (expected - found) or (found - expected):
            raise refuse(f"{schedule.name}, rank {rank}: {action}", f"{expected[action]} times", found[action])
        at = {action: place for place, action in enumerate(row)}
        for chunk in range(schedule.chunks):
            backwards = [action for action in row if action.phase == phases[-1] and action.chunk == chunk]
            if backwards != sorted(backwards):
                what = f"{schedule.name}, rank {rank}: backwards by chunk {chunk}"
                raise refuse(what, "the order of the micro-batches", [action.micro_batch for action in backwards])
        for action in row:
            for before, after in pairwise(phases):
                if action.phase == after and at[action] < at[action._replace(phase=before)]:
                    raise ArgumentError(f"{schedule.name}, rank {rank}: {action} comes before its {before}")
    simulate(schedule)
