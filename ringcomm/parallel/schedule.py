"""Pipeline schedules as data: a table that says, for each rank, what it does in which order. No torch in here.

A model is cut into *stages*, one after the other; a batch into m *micro-batches*. Each of p ranks has v *chunks*: chunk
c of rank r is stage c·p + r, so that what a stage gives goes to the next rank, and from the last one to rank 0.

| schedule    | bubble         | in flight on rank r, at most | paper                                    |
|-------------|----------------|------------------------------|------------------------------------------|
| gpipe       | (p-1) / m      | m                            | Huang et al., GPipe, 2018                |
| 1f1b        | (p-1) / m      | p - r                        | Narayanan et al., SC 2021, section 2.2.1 |
| interleaved | (p-1) / (v·m)  | (v+1)·p - 2r - 1             | the same, section 2.2.2                  |

The *bubble* is the time in which a rank has nothing to do, as a share of the time in which it works. *In flight* is
what has been forward and not yet backward; of an interleaved schedule, the v-th part of a rank's layers each.

The same table is checked (`validate`), timed (`simulate`), drawn (`ringcomm draw 1f1b -p 4 -m 8 -o 1f1b.png`), and
carried out (ringcomm.parallel.pipeline). It is a plain value: whoever has a better one writes it down.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringcomm.errors import ArgumentError, integer, refuse, unknown

__all__ = [
    "BACKWARD",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "Message",
    "Schedule",
    "Span",
    "Timeline",
    "gpipe",
    "interleaved",
    "make_schedule",
    "messages",
    "one_forward_one_backward",
    "simulate",
    "validate",
]

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """What a rank does in one go: the forward or the backward of a micro-batch, by one of its chunks."""

    work: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.work} of micro-batch {self.micro_batch} by chunk {self.chunk}"


class Message(NamedTuple):
    """What passes from stage `boundary` to the next one, an output; or back, its gradient."""

    work: str
    micro_batch: int
    boundary: int


@dataclass(frozen=True)
class Schedule:
    """What each rank does: `table[rank]` are its actions, in order."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int  # of each rank
    table: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return which stage of the model a chunk of a rank is."""
        return chunk * self.ranks + rank

    def needs(self, rank: int, action: Action) -> Message | None:
        """Return what an action waits for; None for a forward of the first stage, and a backward of the last."""
        stage = self.stage(rank, action.chunk)
        return self._message(action, stage - 1 if action.work == FORWARD else stage)

    def gives(self, rank: int, action: Action) -> Message | None:
        """Return what an action has for others; None for a forward of the last stage, and a backward of the first."""
        stage = self.stage(rank, action.chunk)
        return self._message(action, stage if action.work == FORWARD else stage - 1)

    def _message(self, action: Action, boundary: int) -> Message | None:
        inside = 0 <= boundary < self.stages - 1
        return Message(action.work, action.micro_batch, boundary) if inside else None

    def ends(self, message: Message) -> tuple[int, int]:
        """Return who sends a message and who receives it: the same rank, if that has both stages."""
        below, above = message.boundary % self.ranks, (message.boundary + 1) % self.ranks
        return (below, above) if message.work == FORWARD else (above, below)

    def forward_only(self) -> "Schedule":
        """Return the schedule without what is backward, to evaluate a model."""
        rows = (tuple(action for action in row if action.work == FORWARD) for row in self.table)
        return replace(self, name=f"{self.name}, forward only", table=tuple(rows))


# --- The schedules ----------------------------------------------------------------------------------------------------


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every micro-batch is in flight at once."""
    return _filled("gpipe", ranks, micro_batches, 1, lambda rank: micro_batches)


def one_forward_one_backward(ranks: int, micro_batches: int) -> Schedule:
    """As few forwards as the ranks behind need to begin; from then on a forward and a backward in turns."""
    return _filled("1f1b", ranks, micro_batches, 1, lambda rank: ranks - 1 - rank)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B with several chunks for each rank, which take the micro-batches by turns, p of them at a time.

    The bubble is that of a v-th of a rank's work, and v times as many messages are sent.
    """
    if integer("chunks of the interleaved schedule", chunks) < 2:
        raise refuse("chunks of the interleaved schedule", "2 or more for each rank (else it is 1f1b)", chunks)
    if integer("ranks", ranks, 1) and integer("micro-batches", micro_batches, 1) % ranks:
        what = f"micro-batches of the interleaved schedule, which go by turns of {ranks} over {ranks} ranks"
        raise refuse(what, f"a multiple of {ranks}", micro_batches)
    return _filled(
        "interleaved", ranks, micro_batches, chunks, lambda rank: (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    )


SCHEDULES = ("gpipe", "1f1b", "interleaved")


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule of this name. ArgumentError, with the numbers, if there can be none."""
    if name == "interleaved":
        return interleaved(ranks, micro_batches, chunks)
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    if integer("chunks", chunks) != 1:
        raise refuse(f"chunks of {name}", "1 for each rank (interleaved has more)", chunks)
    return (gpipe if name == "gpipe" else one_forward_one_backward)(ranks, micro_batches)


def _filled(name: str, ranks: int, micro_batches: int, chunks: int, ahead: Callable[[int], int]) -> Schedule:
    """Return a schedule whose ranks run `ahead(rank)` forwards, then one forward and one backward in turns.

    The k-th forward and the k-th backward of a rank are the same ones on every rank. Backwards of a chunk come in the
    order of the micro-batches, so that gradients are added in that order.
    """
    integer("ranks", ranks, 1)
    integer("micro-batches", micro_batches, 1)

    def place(k: int) -> tuple[int, int]:
        turn, k = divmod(k, ranks * chunks)
        chunk, k = divmod(k, ranks)
        return turn * ranks + k, chunk

    places = [place(k) for k in range(micro_batches * chunks)]
    forwards = [Action(FORWARD, micro_batch, chunk) for micro_batch, chunk in places]
    backwards = [Action(BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in places]
    table = []
    for rank in range(ranks):
        first = min(ahead(rank), len(forwards))
        turns = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
        table.append((*forwards[:first], *turns, *backwards[len(forwards) - first :]))
    return Schedule(name, ranks, micro_batches, chunks, tuple(table))


# --- Is it one? -------------------------------------------------------------------------------------------------------


def validate(schedule: Schedule) -> None:
    """Check that a table trains: ArgumentError, with rank and action, if it does not.

    Every stage does every micro-batch once forward and then once backward, the backwards in the order of the
    micro-batches: gradients are added in the same order on every stage, and have the bits of one process that takes the
    micro-batches one by one. And no rank waits for ever, though sends wait for nobody.
    """
    if len(schedule.table) != schedule.ranks:
        raise refuse(f"table of {schedule.name}", f"a row for each of {schedule.ranks} ranks", len(schedule.table))
    expected = Counter(
        Action(work, micro_batch, chunk)
        for work in (FORWARD, BACKWARD)
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
    )
    for rank, row in enumerate(schedule.table):
        found = Counter(row)
        for action in (expected - found) or (found - expected):
            raise refuse(f"{schedule.name}, rank {rank}: {action}", f"{expected[action]} times", found[action])
        following = dict.fromkeys(range(schedule.chunks), 0)  # the micro-batch whose backward comes next
        forwards: set[tuple[int, int]] = set()
        for work, micro_batch, chunk in row:
            if work == FORWARD:
                forwards.add((micro_batch, chunk))
            elif micro_batch != following[chunk]:
                what = f"{schedule.name}, rank {rank}: the next backward by chunk {chunk}"
                raise refuse(what, f"micro-batch {following[chunk]}", micro_batch)
            elif (micro_batch, chunk) not in forwards:
                action = Action(work, micro_batch, chunk)
                raise ArgumentError(f"{schedule.name}, rank {rank}: {action} comes before its forward")
            else:
                following[chunk] += 1
    simulate(schedule)


# --- What time does it take? ------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """When an action is done."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time: `spans[rank]` is its row, with begins and ends."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        return max(row[-1].end for row in self.spans)

    @property
    def bubble(self) -> float:
        """How long ranks wait, as a share of how long they work."""
        work = sum(end - begin for row in self.spans for _, begin, end in row)
        return (self.makespan * len(self.spans) - work) / work

    @property
    def peaks(self) -> tuple[int, ...]:
        """Of each rank, the most chunks' activations that it has at once: between a forward and its backward."""
        peaks = []
        for row in self.schedule.table:
            held = most = 0
            for action in row:
                held += 1 if action.work == FORWARD else -1
                most = max(most, held)
            peaks.append(most)
        return tuple(peaks)


def simulate(schedule: Schedule, forward: float = 1, backward: float = 2) -> Timeline:
    """Return when each rank does what, if a chunk takes so long forward and backward, and messages take no time.

    Raises ArgumentError, with what each rank waits for, if they wait for each other.
    """
    if not (forward > 0 and backward > 0):
        raise refuse("times of a forward and a backward", "more than 0", (forward, backward))
    arrived: dict[Message | None, float] = {None: 0}
    spans: list[list[Span]] = [[] for _ in schedule.table]

    def advance(rank: int) -> bool:
        """Do the next action of a rank, if it can be done and there is one."""
        row, done = schedule.table[rank], spans[rank]
        if len(done) == len(row) or (needed := schedule.needs(rank, row[len(done)])) not in arrived:
            return False
        action = row[len(done)]
        begin = max(arrived[needed], done[-1].end if done else 0)
        end = begin + (forward if action.work == FORWARD else backward)
        done.append(Span(action, begin, end))
        if (given := schedule.gives(rank, action)) is not None:
            arrived[given] = end
        return True

    while True in [advance(rank) for rank in range(schedule.ranks)]:
        pass
    waiting = [
        f"rank {rank}: {row[len(done)]} waits for {schedule.needs(rank, row[len(done)])}"
        for rank, (row, done) in enumerate(zip(schedule.table, spans, strict=True))
        if len(done) < len(row)
    ]
    if waiting:
        raise ArgumentError("\n".join([f"{schedule.name}: ranks wait for each other", *waiting]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def messages(schedule: Schedule) -> list[Message]:
    """Return what passes between ranks, in the order in which it can be sent: the simulated time.

    If every rank begins its sends and receives in this order, none waits for ever, not even where the messages of a
    rank go one by one, as they do on a CUDA stream: whatever a message waits for comes before it.
    """
    ready = [
        (end, rank, given)
        for rank, row in enumerate(simulate(schedule).spans)
        for action, _, end in row
        if (given := schedule.gives(rank, action)) is not None
    ]
    return [message for _, _, message in sorted(ready) if len(set(schedule.ends(message))) == 2]
