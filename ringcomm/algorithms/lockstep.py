"""The schedules of all ranks, carried out together in one thread, over whatever stands for elements.

There is no buffering: a send and its receive begin when both ranks are there, and end together. What ends here ends on
any transport.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringcomm.algorithms.schedule import NOBODY, NOTHING, OUT, Block, Copy, Exchange, Lengths, Schedule

__all__ = ["Cells", "Memory", "Places", "Progress", "carry_out", "places"]

Cells = Any  # a list, or a NumPy array: it has slices, and these can be assigned to


class Places(NamedTuple):
    """The arrays of a call on one rank: IN has `given` elements, and OUT `wanted`.

    The rank's own elements begin at `source` in IN and at `target` in OUT; where the call is in place, the two arrays
    overlap so that these are the same place. `stays` of them lie in OUT from the start.
    """

    given: int
    wanted: int
    source: int
    target: int
    stays: int


def places(collective: str, rank: int, lengths: Lengths, root: int) -> Places:
    """Return what `record` says in words."""
    rows, come, whole = lengths.rows, lengths.come, lengths.total
    mine, before = (rows[rank], sum(rows[:rank])) if rows else (0, 0)
    is_root = rank == root
    match collective:
        case "all_reduce":
            return Places(whole, whole, 0, 0, whole)
        case "broadcast":
            return Places(whole * is_root, whole, 0, 0, whole * is_root)
        case "reduce":
            return Places(whole, whole * is_root, 0, 0, 0)
        case "all_gather":
            return Places(mine, whole, 0, before, mine)
        case "gather":
            return Places(mine, whole * is_root, 0, before, mine * is_root)
        case "scatter":
            return Places(whole * is_root, mine, before, 0, mine * is_root)
        case "reduce_scatter":
            return Places(whole, mine, before, 0, 0)
        case "all_to_all":
            return Places(whole, sum(come or rows), before, sum((come or rows)[:rank]), mine)
    return Places(0, 0, 0, 0, 0)


class Memory:
    """The memory of one rank in a call: ranges of `cells`, which `fresh` makes and `given` fills."""

    def __init__(
        self, places: Places, scratch: int, given: Cells, fresh: Callable[[int], Cells], in_place: bool = False
    ) -> None:
        distance = places.source - places.target if in_place else places.given
        first_in, first_out = max(0, -distance), max(0, distance)
        end = max(first_in + places.given, first_out + places.wanted)
        self.begins = first_in, first_out, end  # of IN, OUT and SCRATCH
        self.sizes = places.given, places.wanted, scratch
        self.cells = fresh(end + scratch)
        self.cells[first_in : first_in + places.given] = given
        own = given[places.source : places.source + places.stays]
        self.cells[first_out + places.target : first_out + places.target + places.stays] = own

    def result(self) -> Cells:
        """Return what lies in OUT."""
        return self.cells[self.begins[OUT] : self.begins[OUT] + self.sizes[OUT]]

    def read(self, block: Block) -> Cells:
        memory, begin, end = block
        first = self.begins[memory]
        return self.cells[first + begin : first + end]

    def write(self, block: Block, values: Cells) -> None:
        memory, begin, end = block
        first = self.begins[memory]
        self.cells[first + begin : first + end] = values


class Progress(NamedTuple):
    """How it went: the exchanges that followed on each other, and for each rank a mask of those it has heard from."""

    steps: int
    heard: list[int]


def carry_out(
    schedules: Sequence[Schedule], memories: Sequence[Memory], combine: Callable[[Cells, Cells], Cells]
) -> Progress:
    """Carry out the schedules of all ranks; raise AssertionError where they do not fit together."""
    ranks = range(len(schedules))
    todo = [enumerate(schedule.steps) for schedule in schedules]
    number, current = [0 for _ in ranks], [Exchange(NOBODY, NOTHING, NOBODY, NOTHING, None) for _ in ranks]
    sends, receives = [NOBODY for _ in ranks], [NOBODY for _ in ranks]  # what of the current exchange is not done
    time, began = [0 for _ in ranks], [0 for _ in ranks]  # in exchanges
    heard, told = [1 << rank for rank in ranks], [0 for _ in ranks]

    def meet(sender: int, receiver: int) -> None:
        outgoing = current[sender].outgoing
        _, _, _, incoming, operand = current[receiver]
        try:
            if outgoing[2] - outgoing[1] != incoming[2] - incoming[1]:
                raise AssertionError(f"{outgoing.length} elements are sent, {incoming.length} are expected")
            values = memories[sender].read(outgoing)
            if operand is not None:
                mine = memories[receiver].read(operand)
                values = combine(values, mine) if sender < receiver else combine(mine, values)
            memories[receiver].write(incoming, values)
        except AssertionError as error:
            raise AssertionError(f"from {where(sender)} to {where(receiver)}: {error}") from None
        sends[sender] = receives[receiver] = NOBODY
        heard[receiver] |= told[sender]
        ends = 1 + (began[sender] if began[sender] > began[receiver] else began[receiver])
        if time[sender] < ends:
            time[sender] = ends
        if time[receiver] < ends:
            time[receiver] = ends

    def advance(rank: int) -> None:
        """Go on as far as this rank can without its peers, and note those that can go on after that."""
        for position, step in todo[rank]:
            number[rank] = position
            if isinstance(step, Copy):
                try:
                    memories[rank].write(step.target, memories[rank].read(step.source))
                except AssertionError as error:
                    raise AssertionError(f"in {where(rank)}: {error}") from None
                continue
            current[rank] = step
            began[rank], told[rank] = time[rank], heard[rank]
            dest, source = step.dest, step.source
            sends[rank], receives[rank] = dest, source
            if dest != NOBODY and receives[dest] == rank:
                meet(rank, dest)
                if sends[dest] == NOBODY:
                    ready.append(dest)
            if source != NOBODY and sends[source] == rank:
                meet(source, rank)
                if receives[source] == NOBODY:
                    ready.append(source)
            if sends[rank] != NOBODY or receives[rank] != NOBODY:
                return

    def where(rank: int) -> str:
        return f"rank {rank} (step {number[rank]})"

    ready = [*ranks]
    while ready:
        advance(ready.pop())
    waits = [f"{where(rank)} sends to {peer}" for rank, peer in enumerate(sends) if peer != NOBODY]
    waits += [f"{where(rank)} receives from {peer}" for rank, peer in enumerate(receives) if peer != NOBODY]
    if waits:
        raise AssertionError("deadlock: " + ", ".join(waits[:4]) + (" …" if len(waits) > 4 else ""))
    return Progress(max(time), heard)
