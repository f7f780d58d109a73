"""Pipeline schedules as data: the actions of each rank, in order. This module needs no torch.

A model is divided into *stages*, a batch into m *micro-batches*. Each of p ranks holds v *chunks* (virtual stages):
chunk c of rank r is stage c·p + r, so a stage sends its output to the next rank, and the last rank to rank 0. Only in
zbv the second chunks run back along the ranks, in the shape of a V.

===========  ===========  ========================  ========================================
Schedule     Bubble       Most in flight on rank r  Paper
===========  ===========  ========================  ========================================
gpipe        (p-1)/m      m                         Huang et al., GPipe, 2018
1f1b         (p-1)/m      p - r                     Narayanan et al., SC 2021, section 2.2.1
interleaved  (p-1)/(v·m)  (v+1)·p - 2r - 1          Narayanan et al., SC 2021, section 2.2.2
zb-h1        (p-1)/(3·m)  p                         Qi et al., arXiv 2401.10241, section 2.1
zbv          (p-1)/(6·m)  2p (v = 2)                Qi et al., arXiv 2401.10241, section 6
===========  ===========  ========================  ========================================

The *bubble* is a rank's idle time divided by its compute time. *In flight* counts the chunk activations between a
forward and its backward, or its backward for weights; with v chunks, each holds a v-th of the rank's layers.
`zero_bubble.py` explains the last two schedules. Their figures are for equal times of the three phases and m ≥ p for
zb-h1, m ≥ 2p - 1 for zbv, whose ranks are idle before their first and after their last action only.

One table is checked (`validate`), simulated (`simulate`), drawn (`ringcomm draw 1f1b -p 4 -m 8 -o 1f1b.png`) and
executed (`ringcomm.parallel.Pipeline`). A schedule is a plain value: you can write your own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from ringcomm.errors import integer, unknown
from ringcomm.layout_rules import CHUNKS, check
from ringcomm.pipelining.zero_bubble import zb_h1, zbv

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "P2PTransfer",
    "PipelineSchedule",
    "make_schedule",
]

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward for inputs", "backward for weights"  # together, a backward


class Action(NamedTuple):
    """The forward or backward, or a part of the backward, of one micro-batch through one chunk of a rank."""

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
    """The actions of all ranks.

    `table[rank]` has those of a rank, in order; `chunks` is its number of stages. With `v_shaped`, odd chunks are in
    the reverse order of the ranks.
    """

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    table: tuple[tuple[Action, ...], ...]
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether backwards for inputs and for weights are separate actions."""
        return any(action.phase == BACKWARD_WEIGHT for action in self.table[0])

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of the model that a rank's chunk is."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self.v_shaped and chunk % 2 else rank)

    def rank(self, stage: int) -> int:
        """Return the rank that has a stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def input_of(self, rank: int, action: Action) -> P2PTransfer | None:
        """Return the transfer an action waits for.

        None for a forward of the first stage, a backward of the last, or a backward for weights.
        """
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage - 1 if action.phase == FORWARD else stage)

    def output_of(self, rank: int, action: Action) -> P2PTransfer | None:
        """Return the transfer an action produces.

        None for a forward of the last stage, a backward of the first, or a backward for weights.
        """
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage if action.phase == FORWARD else stage - 1)

    def _transfer(self, action: Action, boundary: int) -> P2PTransfer | None:
        if action.phase == BACKWARD_WEIGHT or not 0 <= boundary < self.stages - 1:
            return None
        return P2PTransfer(FORWARD if action.phase == FORWARD else BACKWARD, action.micro_batch, boundary)

    def endpoints(self, transfer: P2PTransfer) -> tuple[int, int]:
        """Return the sending and the receiving rank, which are equal if one rank has both stages."""
        below, above = self.rank(transfer.boundary), self.rank(transfer.boundary + 1)
        return (below, above) if transfer.phase == FORWARD else (above, below)

    def forward_only(self, micro_batches: int | None = None) -> "PipelineSchedule":
        """Return the schedule without its backwards, for evaluation, of all or only the first micro-batches."""
        count = self.micro_batches if micro_batches is None else micro_batches
        rows = (tuple(each for each in row if each.phase == FORWARD and each.micro_batch < count) for row in self.table)
        return replace(self, name=f"{self.name}, forward only", micro_batches=count, table=tuple(rows))


# --- The schedules ----------------------------------------------------------------------------------------------------

# The forwards that rank r of p runs before it alternates forwards and backwards, given m and v.
WARMUPS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda r, p, m, v: m,
    "1f1b": lambda r, p, m, v: p - 1 - r,
    "interleaved": lambda r, p, m, v: (v - 1) * p + 2 * (p - 1 - r),
}
SPLIT_BACKWARD = {"zb-h1": zb_h1, "zbv": zbv}
SCHEDULES = (*WARMUPS, *SPLIT_BACKWARD)


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> PipelineSchedule:
    """Return a schedule by its name.

    Args:
        name: "gpipe" runs all forwards, then all backwards. "1f1b" runs a forward for each later rank, then alternates
            forwards and backwards. "interleaved" does so with v chunks on each rank, which take turns after every p
            micro-batches: the bubble is v times smaller, and v times as many messages are sent. "zb-h1" and "zbv" fill
            the bubble with the backwards for weights, for which no other rank waits; zbv sends twice as many messages.
        ranks: number of ranks of the pipeline
        micro_batches: number of micro-batches of a batch; interleaved: a multiple of `ranks`
        chunks: number of stages of each rank; interleaved: at least 2 (default: 2), zbv: 2, otherwise 1

    Raises:
        ArgumentError: the name is unknown, or the schedule does not exist for these numbers.
    """
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    chunks = CHUNKS.get(name, 1) if chunks is None else chunks
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks)):
        integer(what, number, 1)
    check(schedule=name, chunks=chunks, pp=ranks, micro_batches=micro_batches)
    if name in SPLIT_BACKWARD:
        rows = [numbered(SPLIT_BACKWARD[name](rank, ranks, micro_batches), micro_batches) for rank in range(ranks)]
    else:
        rows = alternating(WARMUPS[name], ranks, micro_batches, chunks)
    return PipelineSchedule(name, ranks, micro_batches, chunks, tuple(rows), v_shaped=name == "zbv")


def alternating(
    warmup_of: Callable[[int, int, int, int], int], ranks: int, micro_batches: int, chunks: int
) -> list[tuple[Action, ...]]:
    """Return rows that alternate forwards and backwards after a warmup."""
    # The k-th forward and the k-th backward are the same on every rank. The backwards of a chunk follow the order of
    # the micro-batches, which is the order in which gradients are added.
    turns = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    order = [(micro_batch, chunk) for turn in turns for chunk in range(chunks) for micro_batch in turn]
    forwards = [Action(FORWARD, micro_batch, chunk) for micro_batch, chunk in order]
    backwards = [Action(BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order]
    rows = []
    for rank in range(ranks):
        warmup = min(warmup_of(rank, ranks, micro_batches, chunks), len(forwards))
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        rows.append((*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))
    return rows


def numbered(row: Iterable[str], micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a row such as "F0 F1 B1 W1": each phase of a chunk takes the micro-batches in order.

    Actions after the last micro-batch are left out.
    """
    phases = {"F": FORWARD, "B": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
    counts: dict[str, count[int]] = defaultdict(count)
    actions = (Action(phases[each[0]], next(counts[each]), int(each[1])) for each in row)
    return tuple(action for action in actions if action.micro_batch < micro_batches)
