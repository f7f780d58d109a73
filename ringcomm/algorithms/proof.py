"""Prove an algorithm by executing the schedules of all ranks on symbols.

A symbol is a number that identifies an element and its contributions: its index, then one bit per contributing rank.
"""

from collections.abc import Iterator

from ringcomm.algorithms.lockstep import Elements, RankMemory, call_layout, execute
from ringcomm.algorithms.schedule import IN, Algorithm, Block, Copy, Lengths, Schedule, Step, even, record
from ringcomm.types import COLLECTIVES, ROOTED

__all__ = ["prove"]

SIZES = range(2, 65)  # one rank alone needs no algorithm
SMALL = 9  # up to this many ranks, try every root and many block lengths
NAMES = ("IN", "OUT", "SCRATCH")


def prove(algorithm: Algorithm) -> None:
    """Check an algorithm on 2 to 64 ranks; raise AssertionError with the rank and the step unless

    - every send matches a receive of the same length, without deadlock even if nothing is buffered;
    - no rank reads memory before it is written, writes its input, or receives into a block that it is sending;
    - every element arrives at its destination, and every contribution is reduced exactly once;
    - steps, elements sent and scratch memory equal the declared formulas.
    """
    for size in SIZES:
        roots = range(size) if size <= SMALL else (0, size - 1)
        for root in roots if algorithm.collective in ROOTED else (0,):
            _prove_costs(algorithm, size, root)
            for rows, in_place in _calls(algorithm, size):
                call = _Call(algorithm, rows, root, in_place)
                try:
                    _prove_call(call)
                except AssertionError as error:
                    raise AssertionError(f"{call}: {error}") from None


class _Call:
    """A collective call with blocks of these lengths, and the schedule of each rank."""

    def __init__(self, algorithm: Algorithm, rows: tuple[int, ...], root: int, in_place: bool = False) -> None:
        self.algorithm, self.counts, self.root, self.in_place = algorithm, rows, root, in_place
        self.lengths = _lengths(algorithm.collective, rows)
        self.schedules = [record(algorithm, rank, len(rows), mine, root) for rank, mine in enumerate(self.lengths)]

    def __str__(self) -> str:
        root = f", root {self.root}" if self.algorithm.collective in ROOTED else ""
        in_place = ", in place" if self.in_place else ""
        return f"{self.algorithm.title}, {len(self.counts)} ranks with {self.counts}{root}{in_place}"


def _lengths(collective: str, rows: tuple[int, ...]) -> list[Lengths]:
    """Return the lengths of each rank. In an exchange each rank has the blocks in another order."""
    size, row = len(rows), COLLECTIVES[collective]
    if not row.moves_data:
        return [Lengths(())] * size
    if row.exchanges:
        matrix = [tuple(rows[(2 * dest + source) % size] for dest in range(size)) for source in range(size)]
        return [Lengths(*pair) for pair in zip(matrix, zip(*matrix, strict=True), strict=True)]
    return [Lengths(even(sum(rows), size) if row.given == "ARRAY" else rows)] * size


def _calls(algorithm: Algorithm, size: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the block lengths to test, and whether in place."""
    patterns = [(1,) * size]
    if size <= SMALL:
        patterns += [(0,) * size, (3,) * size]
    if size <= SMALL and not algorithm.equal_blocks:
        patterns += [tuple(rank % 3 for rank in range(size)), (0,) * (size - 1) + (5,)]
    if size == 5:
        patterns.append((2000,) * size)  # more than one piece of a chain
    for rows in patterns:
        if size <= SMALL or not algorithm.in_place:
            yield rows, False
        if algorithm.in_place:
            yield rows, True


def _prove_costs(algorithm: Algorithm, size: int, root: int) -> None:
    """Compare the elements sent and the scratch memory with the formulas."""
    block = 1 << size.bit_length() - 1 if "/ p" in algorithm.sent else 1  # so that everything divides evenly
    schedules = _Call(algorithm, (block,) * size, root).schedules
    sent = max(sum(step.outgoing.length for step in each.steps if not isinstance(step, Copy)) for each in schedules)
    _compare(algorithm, "sent", sent, size, size * block)
    _compare(algorithm, "scratch", max(each.scratch for each in schedules), size, size * block)


def _compare(algorithm: Algorithm, name: str, found: int, size: int, elements: int) -> None:
    formula = getattr(algorithm, name)
    if found != formula(size, elements):
        raise AssertionError(
            f"{algorithm.title}, {size} ranks, {elements} elements: {name} is {found}, declared is "
            f"{formula} = {formula(size, elements):g}"
        )


def _prove_call(call: _Call) -> None:
    """Execute the call, and check the output of each rank."""
    size = len(call.counts)
    memories = [_SymbolicMemory(call, rank, schedule) for rank, schedule in enumerate(call.schedules)]
    steps, heard_from = execute(call.schedules, memories, memories[0].add)
    for rank, memory in enumerate(memories):
        found, wanted = memory.result(), _wanted(call, rank)
        if found != wanted:
            index, (got, right) = next(
                (i, pair) for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]
            )
            text = f"rank {rank} ends with {memory.describe(got)} in OUT[{index}], expected {memory.describe(right)}"
            raise AssertionError(text)
        if not COLLECTIVES[call.algorithm.collective].moves_data and heard_from[rank] != memory.everyone:
            missing = [other for other in range(size) if not heard_from[rank] >> other & 1]
            raise AssertionError(f"rank {rank} leaves without a signal from {missing}")
    _compare(call.algorithm, "steps", steps, size, sum(call.counts))


def _wanted(call: _Call, rank: int) -> list[int]:
    """Return the expected OUT."""
    row, size, root = COLLECTIVES[call.algorithm.collective], len(call.counts), call.root
    if not row.gets(rank, root):
        return []
    counts, received = call.lengths[rank]
    if row.reduces or row.given_by == "ROOT":  # all elements have the contributions of the same ranks
        own = (0, sum(counts)) if row.got == "ARRAY" else (sum(counts[:rank]), counts[rank])
        pieces = [((1 << size) - 1 if row.reduces else 1 << root, *own)]
    else:  # each rank's block is its own
        begins = [sum(each.counts[:rank]) if row.given == "BLOCKS" else 0 for each in call.lengths]
        pieces = [(1 << source, begins[source], length) for source, length in enumerate(received or counts)]
    return [symbol for piece in pieces for symbol in _symbols(size, *piece)]


def _symbols(size: int, ranks: int, begin: int, length: int) -> range:
    """Return the symbols of elements from `begin` on, with the contributions of these ranks (a mask)."""
    return range(begin << size | ranks, (begin + length) << size | ranks, 1 << size)


class _SymbolicMemory(RankMemory):
    """Memory of symbols; None has not been written."""

    def __init__(self, call: _Call, rank: int, schedule: Schedule) -> None:
        self.rank, self.size = rank, len(call.counts)
        self.everyone = (1 << self.size) - 1
        layout = call_layout(call.algorithm.collective, rank, call.lengths[rank], call.root)
        data = [*_symbols(self.size, 1 << rank, 0, layout.in_length)]
        super().__init__(layout, schedule.scratch, data, lambda count: [None] * count, call.in_place)
        for number, step in enumerate(schedule.steps):
            try:
                self._check(step)
            except AssertionError as error:
                raise AssertionError(f"rank {rank} (step {number}): {error}") from None

    def _check(self, step: Step) -> None:
        """Check the peers of a step, and the memory that it reads and writes."""
        if isinstance(step, Copy):
            read, written, operand = step.source, step.target, None
        else:
            dest, read, source, written, operand = step
            if self.rank in (dest, source):
                raise AssertionError("exchanges with itself")
        reads, writes = self._range(read), self._range(written)
        if written[0] == IN and writes[0] < writes[1]:
            raise AssertionError(f"writes {_name(written)}")
        if reads[0] < writes[1] and writes[0] < reads[1]:
            raise AssertionError(f"writes {_name(written)} while {_name(read)} is read")
        if operand is not None:
            adds = self._range(operand)
            if adds != writes and adds[0] < writes[1] and writes[0] < adds[1]:
                raise AssertionError(f"writes {_name(written)} while {_name(operand)} is reduced")

    def _range(self, block: Block) -> tuple[int, int]:
        memory, begin, end = block
        if not 0 <= begin <= end <= self.sizes[memory]:
            raise AssertionError(f"{_name(block)} is not within its {self.sizes[memory]} elements")
        first = self.begins[memory]
        return first + begin, first + end

    def read(self, block: Block) -> Elements:
        values = super().read(block)
        if None in values:
            raise AssertionError(f"rank {self.rank} reads {_name(block)}, which it has not written")
        return values

    def add(self, mine: list[int], others: list[int]) -> list[int]:
        """Return the reduced elements: each holds the contributions of both."""
        for one, other in zip(mine, others, strict=True):
            if one ^ other > self.everyone:  # the indices differ
                raise AssertionError(f"{self.describe(other)} is added to {self.describe(one)}")
            if one & other & self.everyone:
                raise AssertionError(f"{self.describe(other)} is added to {self.describe(one)}: a contribution twice")
        return [one | other for one, other in zip(mine, others, strict=True)]

    def describe(self, symbol: int | None) -> str:
        if symbol is None:
            return "nothing"
        ranks = [str(rank) for rank in range(self.size) if symbol >> rank & 1]
        return f"element {symbol >> self.size} of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _name(block: Block) -> str:
    return f"{NAMES[block.memory]}[{block.begin}:{block.end}]"
