"""Execute the schedules of all ranks in one thread, over any kind of elements.

Nothing is buffered (schedule_table.py): a schedule that ends here ends on every transport.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringcomm.algorithms.schedule import EMPTY, NO_PEER, OUT, Block, Copy, Exchange, Lengths, Schedule
from ringcomm.algorithms.schedule_table import ScheduleTable
from ringcomm.types import COLLECTIVES

__all__ = ["CallLayout", "Elements", "Progress", "RankMemory", "Transfer", "call_layout", "execute"]

Elements = Any  # a list or a NumPy array: supports slices and slice assignment


class CallLayout(NamedTuple):
    """The arrays of a call on one rank.

    The rank's own elements begin at `source` in IN and at `target` in OUT. In place, the arrays overlap so that both
    are the same memory. OUT holds the first `preset` of them from the start.
    """

    in_length: int
    out_length: int
    source: int
    target: int
    preset: int


def call_layout(collective: str, rank: int, lengths: Lengths, root: int) -> CallLayout:
    """Return the layout that the docstring of `record` describes."""
    row = COLLECTIVES[collective]
    counts, received = lengths.counts, lengths.recv_counts or lengths.counts
    mine, before = (counts[rank], sum(counts[:rank])) if counts else (0, 0)
    gives, gets = (by == "ALL" or rank == root for by in (row.given_by, row.got_by))
    sizes = {"NOTHING": 0, "ARRAY": lengths.total, "BLOCK": mine, "BLOCKS": lengths.total}
    in_length = sizes[row.given] * gives
    out_length = (sum(received) if row.got == "BLOCKS" else sizes[row.got]) * gets
    source = before if row.given == "BLOCKS" else 0
    target = sum(received[:rank]) if row.got == "BLOCKS" else 0
    if row.given == "ARRAY":  # a sum begins in OUT if every rank gets it
        return CallLayout(in_length, out_length, source, target, in_length if row.got_by == "ALL" else 0)
    return CallLayout(in_length, out_length, source, target, 0 if row.reduces else mine * gives * gets)


class RankMemory:
    """IN, OUT and SCRATCH of one rank in a call: ranges of one array, which `allocate` returns."""

    def __init__(
        self,
        layout: CallLayout,
        scratch: int,
        data: Elements,
        allocate: Callable[[int], Elements],
        in_place: bool = False,
    ) -> None:
        in_length, out_length, source, target, preset = layout
        distance = source - target if in_place else in_length
        first_in, first_out = max(0, -distance), max(0, distance)
        end = max(first_in + in_length, first_out + out_length)
        self.begins = first_in, first_out, end  # of IN, OUT and SCRATCH
        self.sizes = in_length, out_length, scratch
        self.elements = allocate(end + scratch)
        self.elements[first_in : first_in + in_length] = data
        self.elements[first_out + target : first_out + target + preset] = data[source : source + preset]

    def result(self) -> Elements:
        """Return OUT."""
        return self.elements[self.begins[OUT] : self.begins[OUT] + self.sizes[OUT]]

    def read(self, block: Block) -> Elements:
        memory, begin, end = block
        first = self.begins[memory]
        return self.elements[first + begin : first + end]

    def write(self, block: Block, values: Elements) -> None:
        memory, begin, end = block
        first = self.begins[memory]
        self.elements[first + begin : first + end] = values


class Transfer(NamedTuple):
    """A message, in the wave of that number; `reduced` if the receiver reduces it into its own data."""

    wave: int
    sender: int
    receiver: int
    reduced: bool
    elements: Elements


class Progress(NamedTuple):
    """The longest chain of dependent exchanges, and for each rank a mask of the ranks it depends on."""

    steps: int
    heard_from: list[int]


def execute(
    schedules: Sequence[Schedule],
    memories: Sequence[RankMemory],
    combine: Callable[[Elements, Elements], Elements],
    watch: Callable[[Transfer], None] = lambda transfer: None,
) -> Progress:
    """Execute the schedules of all ranks; raise AssertionError if they do not match. `watch` sees each transfer."""
    heard_from = [1 << rank for rank in range(len(schedules))]
    at_begin = [*heard_from]  # of the current exchange
    todo = [iter(schedule.steps) for schedule in schedules]
    position = [-1] * len(schedules)  # of the current step
    current = [Exchange(NO_PEER, EMPTY, NO_PEER, EMPTY, None)] * len(schedules)
    longest = 0
    for number, wave in enumerate(ScheduleTable(schedules).waves()):
        at: tuple[int, ...] = ()  # the ranks whose step is being executed
        try:
            for at in zip(wave.senders.tolist(), wave.receivers.tolist(), strict=True):
                sender, receiver = at
                outgoing = current[sender].outgoing
                _, _, _, incoming, operand = current[receiver]
                if outgoing.length != incoming.length:
                    raise AssertionError(f"{outgoing.length} elements are sent, {incoming.length} expected")
                elements = values = memories[sender].read(outgoing)
                if operand is not None:
                    mine = memories[receiver].read(operand)
                    values = combine(values, mine) if sender < receiver else combine(mine, values)
                memories[receiver].write(incoming, values)
                longest, heard_from[receiver] = number, heard_from[receiver] | at_begin[sender]
                watch(Transfer(number, sender, receiver, operand is not None, elements))
            for rank in wave.done.tolist():
                at, memory, at_begin[rank] = (rank,), memories[rank], heard_from[rank]
                for step in todo[rank]:
                    position[rank] += 1
                    if not isinstance(step, Copy):
                        current[rank] = step
                        break
                    memory.write(step.target, memory.read(step.source))
        except AssertionError as error:
            where = " to ".join(f"rank {rank} (step {position[rank]})" for rank in at)
            raise AssertionError(f"{'in' if len(at) == 1 else 'from'} {where}: {error}") from None
    return Progress(longest, heard_from)
