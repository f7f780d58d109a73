"""Execute the schedules of all ranks in one thread, over any kind of elements.

Nothing is buffered: a send and its receive begin when both ranks are ready, and end together. A schedule that ends here
ends on every transport.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringcomm.algorithms.schedule import EMPTY, NO_PEER, OUT, Block, Copy, Exchange, Lengths, Schedule
from ringcomm.types import COLLECTIVES

__all__ = ["CallLayout", "Elements", "Progress", "RankMemory", "call_layout", "execute"]

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


class Progress(NamedTuple):
    """The longest chain of dependent exchanges, and for each rank a mask of the ranks it depends on."""

    steps: int
    heard_from: list[int]


def execute(
    schedules: Sequence[Schedule], memories: Sequence[RankMemory], combine: Callable[[Elements, Elements], Elements]
) -> Progress:
    """Execute the schedules of all ranks; raise AssertionError if they do not match."""
    ranks = range(len(schedules))
    todo = [enumerate(schedule.steps) for schedule in schedules]
    number, current = [0 for _ in ranks], [Exchange(NO_PEER, EMPTY, NO_PEER, EMPTY, None) for _ in ranks]
    sends, receives = [NO_PEER for _ in ranks], [NO_PEER for _ in ranks]  # the pending halves of the current exchange
    time, began = [0 for _ in ranks], [0 for _ in ranks]  # in exchanges
    heard_from, at_begin = [1 << rank for rank in ranks], [0 for _ in ranks]

    def transfer(sender: int, receiver: int) -> None:
        outgoing = current[sender].outgoing
        _, _, _, incoming, operand = current[receiver]
        try:
            if outgoing[2] - outgoing[1] != incoming[2] - incoming[1]:
                raise AssertionError(f"{outgoing.length} elements are sent, {incoming.length} expected")
            values = memories[sender].read(outgoing)
            if operand is not None:
                mine = memories[receiver].read(operand)
                values = combine(values, mine) if sender < receiver else combine(mine, values)
            memories[receiver].write(incoming, values)
        except AssertionError as error:
            raise AssertionError(f"from {where(sender)} to {where(receiver)}: {error}") from None
        sends[sender] = receives[receiver] = NO_PEER
        heard_from[receiver] |= at_begin[sender]
        ends = 1 + (began[sender] if began[sender] > began[receiver] else began[receiver])
        if time[sender] < ends:
            time[sender] = ends
        if time[receiver] < ends:
            time[receiver] = ends

    def advance(rank: int) -> None:
        """Run this rank until it must wait for a peer; append the peers that can then continue to `ready`."""
        for position, step in todo[rank]:
            number[rank] = position
            if isinstance(step, Copy):
                try:
                    memories[rank].write(step.target, memories[rank].read(step.source))
                except AssertionError as error:
                    raise AssertionError(f"in {where(rank)}: {error}") from None
                continue
            current[rank] = step
            began[rank], at_begin[rank] = time[rank], heard_from[rank]
            dest, source = step.dest, step.source
            sends[rank], receives[rank] = dest, source
            if dest != NO_PEER and receives[dest] == rank:
                transfer(rank, dest)
                if sends[dest] == NO_PEER:
                    ready.append(dest)
            if source != NO_PEER and sends[source] == rank:
                transfer(source, rank)
                if receives[source] == NO_PEER:
                    ready.append(source)
            if sends[rank] != NO_PEER or receives[rank] != NO_PEER:
                return

    def where(rank: int) -> str:
        return f"rank {rank} (step {number[rank]})"

    ready = [*ranks]
    while ready:
        advance(ready.pop())
    waits = [f"{where(rank)} sends to {peer}" for rank, peer in enumerate(sends) if peer != NO_PEER]
    waits += [f"{where(rank)} receives from {peer}" for rank, peer in enumerate(receives) if peer != NO_PEER]
    if waits:
        raise AssertionError("deadlock: " + ", ".join(waits[:4]) + (" …" if len(waits) > 4 else ""))
    return Progress(max(time), heard_from)
