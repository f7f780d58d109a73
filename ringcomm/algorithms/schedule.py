"""What an algorithm is: a function that tells a `Port` what one rank does. What it has told is a `Schedule`.

An algorithm looks at ranks and lengths only, never at values. So what a rank does can be written down without the other
ranks and without data, once for each length: the schedule. It is what is proved (ringcomm.algorithms.proof), priced,
drawn, and carried out (ringcomm.transports.mpi.lane).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import ceil, log2, sqrt
from types import CodeType
from typing import NamedTuple

__all__ = [
    "ALGORITHMS",
    "IN",
    "NOBODY",
    "NOTHING",
    "OUT",
    "SCRATCH",
    "Algorithm",
    "Block",
    "Copy",
    "Exchange",
    "Formula",
    "Lengths",
    "Port",
    "Schedule",
    "Step",
    "algorithm",
    "even",
    "joined",
    "record",
]

IN, OUT, SCRATCH = range(3)  # the memory of a call: what is given, what is wanted, and what the algorithm asked for
NOBODY = -1


class Block(NamedTuple):
    """Elements `begin` to `end` of one of the memories of a call."""

    memory: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "Block":
        """Return elements `begin` to `end` of this block."""
        return Block(self.memory, self.begin + begin, self.begin + end)

    def split(self, lengths: Sequence[int]) -> list["Block"]:
        """Divide the block into blocks of these lengths."""
        bounds = accumulate(lengths, initial=self.begin)
        return [Block(self.memory, begin, end) for begin, end in pairwise(bounds)]


def joined(blocks: Sequence[Block]) -> Block:
    """Return the block that blocks which follow on each other make together."""
    return Block(blocks[0].memory, blocks[0].begin, blocks[-1].end)


class Exchange(NamedTuple):
    """Send and receive at once. Either may be missing: its peer is NOBODY.

    With `operand` what comes is combined with that, the share of the lower rank first, and the result is written to
    `incoming`.
    """

    dest: int
    outgoing: Block
    source: int
    incoming: Block
    operand: Block | None


class Copy(NamedTuple):
    """Copy inside a rank."""

    source: Block
    target: Block


Step = Exchange | Copy
NOTHING = Block(SCRATCH, 0, 0)


class Schedule(NamedTuple):
    """What one rank does, step by step, and the elements of scratch memory that it needs for that."""

    steps: tuple[Step, ...]
    scratch: int

    def without(self, peers: Collection[int]) -> "Schedule":
        """Return the schedule without what is exchanged with these ranks."""
        steps: list[Step] = []
        for step in self.steps:
            if isinstance(step, Exchange):
                if step.dest in peers:
                    step = step._replace(dest=NOBODY, outgoing=NOTHING)
                if step.source in peers:
                    step = step._replace(source=NOBODY, incoming=NOTHING, operand=None)
            steps.append(step)
        return Schedule(tuple(steps), self.scratch)


class Port:
    """The vocabulary of an algorithm, for one rank. It writes down what it is told."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._steps: list[Step] = []
        self._scratch = 0

    def send(self, block: Block, dest: int) -> None:
        """Send a block. It is there when the receive is."""
        self._steps.append(Exchange(dest, block, NOBODY, NOTHING, None))

    def recv(self, block: Block, source: int, operand: Block | None = None) -> None:
        """Receive into `block`; with `operand`, that combined with what came. The operand may be the block itself."""
        self._steps.append(Exchange(NOBODY, NOTHING, source, block, operand))

    def exchange(self, outgoing: Block, dest: int, incoming: Block, source: int, operand: Block | None = None) -> None:
        """Send and receive at once. What is sent is read before anything that comes is written over it: never both."""
        self._steps.append(Exchange(dest, outgoing, source, incoming, operand))

    def copy(self, source: Block, target: Block) -> None:
        """Copy inside this rank; nothing where both are the same. Copies that follow on each other become one."""
        if source == target or source.begin == source.end:
            return
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Copy) and _follows(source, last.source) and _follows(target, last.target):
            source, target = joined((last.source, source)), joined((last.target, target))
            self._steps.pop()
        self._steps.append(Copy(source, target))

    def scratch(self, length: int) -> Block:
        """Return memory of this call's own."""
        self._scratch += length
        return Block(SCRATCH, self._scratch - length, self._scratch)

    def schedule(self) -> Schedule:
        return Schedule(tuple(self._steps), self._scratch)


def _follows(block: Block, other: Block) -> bool:
    return block.begin == other.end and block.memory == other.memory


class Lengths(NamedTuple):
    """How long the arrays of a call are, in elements.

    `rows` are the lengths of the ranks' blocks; those of an all_reduce, reduce or broadcast are the equal parts of its
    array. For all_to_all they are those that this rank sends, and `come` those that it receives.
    """

    rows: tuple[int, ...]
    come: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.rows)


def even(count: int, parts: int) -> tuple[int, ...]:
    """Divide `count` into parts that differ by one at most; the longer ones come first."""
    share, rest = divmod(count, parts)
    return (share + 1,) * rest + (share,) * (parts - rest)


class Formula(str):
    """A cost as it is read and computed: `Formula("S - S / n")(5, 1000)` is 800.

    n are the ranks, p is the largest power of two within n, and S are the elements of the larger array. bits(n) counts
    the ones in all the numbers below n, written in binary.
    """

    __slots__ = ()

    def __call__(self, size: int, elements: int) -> float:
        names = {"n": size, "p": 1 << size.bit_length() - 1, "S": elements}
        functions = {"bits": _bits, "ceil": ceil, "log2": log2, "max": max, "sqrt": sqrt}
        return float(eval(_compiled(self), {**functions, **names}))


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "formula", "eval")


def _bits(size: int) -> int:
    return sum(number.bit_count() for number in range(size))


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A function over a port, with what it costs.

    `steps` are the exchanges that follow on each other, until the last rank is done. `sent` and `scratch` are elements,
    on the rank that has most of them, where the array divides evenly.
    """

    name: str
    collective: str
    tell: Callable[..., None]
    steps: Formula
    sent: Formula
    scratch: Formula
    equal_blocks: bool
    in_place: bool

    @property
    def title(self) -> str:
        return f"{self.name} {self.collective}"


ALGORITHMS: dict[str, dict[str, Algorithm]] = {}  # by collective and name


def algorithm(
    name: str,
    collective: str,
    *,
    steps: str,
    sent: str,
    scratch: str = "0",
    equal_blocks: bool = False,
    in_place: bool = True,
) -> Callable[[Callable[..., None]], Algorithm]:
    """Enter a function into ALGORITHMS, with its formulas. Its docstring says what these do not.

    `equal_blocks`: it needs blocks of one length. `in_place`: input and output may be the same memory.
    """

    def enter(tell: Callable[..., None]) -> Algorithm:
        formulas = Formula(steps), Formula(sent), Formula(scratch)
        found = Algorithm(name, collective, tell, *formulas, equal_blocks, in_place)
        named = ALGORITHMS.setdefault(collective, {})
        assert name not in named, f"two algorithms are called {name}"
        named[name] = found
        return found

    return enter


@lru_cache(maxsize=512)
def record(algorithm: Algorithm, rank: int, size: int, lengths: Lengths, root: int = 0) -> Schedule:
    """Return what `rank` does, where there are other ranks. IN is what the rank gives, OUT what it gets:

    all_reduce, broadcast: OUT is the array, and what is given lies there already. reduce: both are the whole array, OUT
    on the root only. gather, all_gather: IN is this rank's block, OUT are all blocks (gather: on the root only), of
    which the own lies there already. scatter, reduce_scatter: the other way round; the own block of the root of a
    scatter lies in OUT already. all_to_all: IN are the blocks to send, OUT those that come, of which the own lies there
    already.
    """
    port = Port(rank, size)
    whole = lengths.total
    mine = lengths.rows[rank] if lengths.rows else 0
    match algorithm.collective:
        case "barrier":
            algorithm.tell(port)
        case "all_reduce":
            algorithm.tell(port, Block(OUT, 0, whole))
        case "broadcast":
            algorithm.tell(port, Block(OUT, 0, whole), root)
        case "reduce":
            algorithm.tell(port, Block(IN, 0, whole), Block(OUT, 0, whole), root)
        case "all_gather":
            algorithm.tell(port, Block(OUT, 0, whole).split(lengths.rows))
        case "gather":
            algorithm.tell(port, Block(IN, 0, mine), Block(OUT, 0, whole).split(lengths.rows), root)
        case "scatter":
            algorithm.tell(port, Block(IN, 0, whole).split(lengths.rows), Block(OUT, 0, mine), root)
        case "reduce_scatter":
            algorithm.tell(port, Block(IN, 0, whole).split(lengths.rows), Block(OUT, 0, mine))
        case "all_to_all":
            come = lengths.come or lengths.rows
            blocks = Block(IN, 0, whole).split(lengths.rows), Block(OUT, 0, sum(come)).split(come)
            algorithm.tell(port, *blocks)
    return port.schedule()
