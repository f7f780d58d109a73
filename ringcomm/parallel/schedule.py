"""Pipeline schedules as data: the actions of each rank, in order. This module needs no torch.

A model is divided into *stages*, a batch into m *micro-batches*. Each of p ranks holds v *chunks* (virtual stages):
chunk c of rank r is stage c·p + r, so a stage sends its output to the next rank, and the last rank to rank 0.

===========  ===========  =============================  ========================================
Schedule     Bubble       Most in flight on rank r       Paper
===========  ===========  =============================  ========================================
gpipe        (p-1)/m      m                              Huang et al., GPipe, 2018
1f1b         (p-1)/m      p - r                          Narayanan et al., SC 2021, section 2.2.1
interleaved  (p-1)/(v·m)  (v+1)·p - 2r - 1               Narayanan et al., SC 2021, section 2.2.2
===========  ===========  =============================  ========================================

The *bubble* is a rank's idle time divided by its compute time. *In flight* counts the chunk activations between a
forward and its backward; with v chunks, each holds a v-th of the rank's layers.

One table is checked (`validate`), simulated (`simulate`), drawn (`ringcomm draw 1f1b -p 4 -m 8 -o 1f1b.png`) and
executed (`ringcomm.parallel.Pipeline`). A schedule is a plain value: you can write your own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ringcomm.errors import ArgumentError, integer, refuse, unknown

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "P2PTransfer",
    "PipelineSchedule",
    "Span",
    "Timeline",
    "make_schedule",
    "simulate",
    "transfers",
    "validate",
]

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """The forward or backward of one micro-batch through one chunk of a rank."""

    phase: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.phase} of micro-batch {self.micro_batch} by chunk {self.chunk}"


class P2PTransfer(NamedTuple):
    """An activation sent from stage `boundary` to the next stage, or its gradient sent back."""

    phase: str
    micro_batch: int
    boundary: int


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of all ranks: `table[rank]` has those of a rank, in order; `chunks` is its number of stages."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    table: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of the model that a rank's chunk is."""
        return chunk * self.ranks + rank

    def input_of(self, rank: int, action: Action) -> P2PTransfer | None:
        """Return the transfer an action waits for; None for a forward of the first stage or a backward of the last."""
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage - 1 if action.phase == FORWARD else stage)

    def output_of(self, rank: int, action: Action) -> P2PTransfer | None:
        """Return the transfer an action produces; None for a forward of the last stage or a backward of the first."""
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage if action.phase == FORWARD else stage - 1)

    def _transfer(self, action: Action, boundary: int) -> P2PTransfer | None:
        inside = 0 <= boundary < self.stages - 1
        return P2PTransfer(action.phase, action.micro_batch, boundary) if inside else None

    def endpoints(self, transfer: P2PTransfer) -> tuple[int, int]:
        """Return the sending and the receiving rank, which are equal if one rank has both stages."""
        below, above = transfer.boundary % self.ranks, (transfer.boundary + 1) % self.ranks
        return (below, above) if transfer.phase == FORWARD else (above, below)

    def forward_only(self, micro_batches: int | None = None) -> "PipelineSchedule":
        """Return the schedule without its backwards, for evaluation, of all or only the first micro-batches."""
        count = self.micro_batches if micro_batches is None else micro_batches
        rows = (tuple(each for each in row if each.phase == FORWARD and each.micro_batch < count) for row in self.table)
        return replace(self, name=f"{self.name}, forward only", micro_batches=count, table=tuple(rows))


# --- The schedules ----------------------------------------------------------------------------------------------------

# For each schedule, the forwards that rank r of p runs before it alternates forwards and backwards, given m and v.
SCHEDULES: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda r, p, m, v: m,
    "1f1b": lambda r, p, m, v: p - 1 - r,
    "interleaved": lambda r, p, m, v: (v - 1) * p + 2 * (p - 1 - r),
}


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Return a schedule by its name.

    Args:
        name: "gpipe" runs all forwards, then all backwards. "1f1b" runs a forward for each later rank, then alternates
            forwards and backwards. "interleaved" does so with v chunks on each rank, which take turns after every p
            micro-batches: the bubble is v times smaller, and v times as many messages are sent.
        ranks: number of ranks of the pipeline
        micro_batches: number of micro-batches of a batch; interleaved: a multiple of `ranks`
        chunks: number of stages of each rank; interleaved: at least 2, otherwise 1

    Raises:
        ArgumentError: the name is unknown, or the schedule does not exist for these numbers.
    """
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks)):
        integer(what, number, 1)
    if (chunks > 1) is not (name == "interleaved"):
        raise refuse(f"chunks of {name}", "at least 2 per rank" if chunks == 1 else "1 per rank", chunks)
    if name == "interleaved" and micro_batches % ranks:
        raise refuse("micro-batches of interleaved", f"a multiple of {ranks} ranks", micro_batches)
    # The k-th forward and the k-th backward are the same on every rank. The backwards of a chunk follow the order of
    # the micro-batches, which is the order in which gradients are added.
    turns = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    order = [(micro_batch, chunk) for turn in turns for chunk in range(chunks) for micro_batch in turn]
    forwards = [Action(FORWARD, micro_batch, chunk) for micro_batch, chunk in order]
    backwards = [Action(BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order]
    table = []
    for rank in range(ranks):
        warmup = min(SCHEDULES[name](rank, ranks, micro_batches, chunks), len(forwards))
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        table.append((*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))
    return PipelineSchedule(name, ranks, micro_batches, chunks, tuple(table))


def validate(schedule: PipelineSchedule) -> None:
    """Check that a schedule trains a model.

    Every stage runs each micro-batch forward once and later backward once. Backwards follow the order of the
    micro-batches, so gradients have the bits of one process that runs the micro-batches one by one. With sends that do
    not block, no rank waits forever.

    Raises:
        ArgumentError: the schedule does not; the message names the rank and the action.
    """
    if len(schedule.table) != schedule.ranks:
        raise refuse(f"table of {schedule.name}", f"a row for each of {schedule.ranks} ranks", len(schedule.table))
    expected = Counter(
        Action(phase, micro_batch, chunk)
        for phase in (FORWARD, BACKWARD)
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
    )
    for rank, row in enumerate(schedule.table):
        found = Counter(row)
        for action in (expected - found) or (found - expected):
            raise refuse(f"{schedule.name}, rank {rank}: {action}", f"{expected[action]} times", found[action])
        at = {action: place for place, action in enumerate(row)}
        for chunk in range(schedule.chunks):
            backwards = [action for action in row if action.phase == BACKWARD and action.chunk == chunk]
            if backwards != sorted(backwards):
                what = f"{schedule.name}, rank {rank}: backwards by chunk {chunk}"
                raise refuse(what, "the order of the micro-batches", [action.micro_batch for action in backwards])
            for action in backwards:
                if at[action] < at[action._replace(phase=FORWARD)]:
                    raise ArgumentError(f"{schedule.name}, rank {rank}: {action} comes before its forward")
    simulate(schedule)


# --- Simulation -------------------------------------------------------------------------------------------------------


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
        rows = ([1 if action.phase == FORWARD else -1 for action in row] for row in self.schedule.table)
        return tuple(max(accumulate(row)) for row in rows)


def simulate(schedule: PipelineSchedule, forward: float = 1, backward: float = 2) -> Timeline:
    """Return the times of all actions, given those of a chunk's forward and backward; transfers take no time.

    Raises:
        ArgumentError: a time is not positive, or the ranks deadlock; the message has what each rank waits for.
    """
    if not (forward > 0 and backward > 0):
        raise refuse("times of a forward and a backward", "more than 0", (forward, backward))
    arrived: dict[P2PTransfer | None, float] = {None: 0}
    spans: list[list[Span]] = [[] for _ in schedule.table]

    def advance(rank: int) -> bool:
        """Run a rank's next action; return False if there is none or its input has not arrived."""
        row, done = schedule.table[rank], spans[rank]
        if len(done) == len(row) or (needed := schedule.input_of(rank, row[len(done)])) not in arrived:
            return False
        action = row[len(done)]
        begin = max(arrived[needed], done[-1].end if done else 0)
        end = begin + (forward if action.phase == FORWARD else backward)
        done.append(Span(action, begin, end))
        if output := schedule.output_of(rank, action):
            arrived[output] = end
        return True

    while True in [advance(rank) for rank in range(schedule.ranks)]:
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
