"""An algorithm is a function that records one rank's steps on a `Port`; the recording is a `Schedule`.

An algorithm depends on ranks and lengths, never on values. So one rank's schedule can be recorded without its peers and
without data, once per length. Schedules are proved (ringcomm.algorithms.proof), simulated, drawn and executed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import ceil, log2, sqrt
from types import CodeType
from typing import NamedTuple

from ringcomm.algorithms.closed_forms import CostTerm
from ringcomm.types import COLLECTIVES

__all__ = [
    "ALGORITHMS",
    "EMPTY",
    "IN",
    "NO_PEER",
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

IN, OUT, SCRATCH = range(3)  # the memories of a call: input, output, and what the algorithm has allocated
NO_PEER = -1


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
    """Return consecutive blocks as one block."""
    return Block(blocks[0].memory, blocks[0].begin, blocks[-1].end)


class Exchange(NamedTuple):
    """Send and receive at the same time. Either may be missing: its peer is NO_PEER.

    With `operand`, the received data are combined with it, the lower rank's share first; `incoming` gets the result.
    """

    dest: int
    outgoing: Block
    source: int
    incoming: Block
    operand: Block | None


class Copy(NamedTuple):
    """A local copy."""

    source: Block
    target: Block


Step = Exchange | Copy
EMPTY = Block(SCRATCH, 0, 0)


class Schedule(NamedTuple):
    """The steps of one rank, and the elements of scratch memory that they need."""

    steps: tuple[Step, ...]
    scratch: int

    def without(self, peers: Collection[int]) -> "Schedule":
        """Return the schedule without the sends to and receives from these ranks."""
        steps: list[Step] = []
        for step in self.steps:
            if isinstance(step, Exchange):
                if step.dest in peers:
                    step = step._replace(dest=NO_PEER, outgoing=EMPTY)
                if step.source in peers:
                    step = step._replace(source=NO_PEER, incoming=EMPTY, operand=None)
            steps.append(step)
        return Schedule(tuple(steps), self.scratch)


class Port:
    """Records the steps of an algorithm for one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._steps: list[Step] = []
        self._scratch = 0

    def send(self, block: Block, dest: int) -> None:
        """Send a block; the step ends when the peer has received it."""
        self._steps.append(Exchange(dest, block, NO_PEER, EMPTY, None))

    def recv(self, block: Block, source: int, operand: Block | None = None) -> None:
        """Receive into `block`, combined with `operand` if given; the operand may be the block itself."""
        self._steps.append(Exchange(NO_PEER, EMPTY, source, block, operand))

    def exchange(self, outgoing: Block, dest: int, incoming: Block, source: int, operand: Block | None = None) -> None:
        """Send and receive at the same time; `outgoing` and `incoming` must not overlap."""
        self._steps.append(Exchange(dest, outgoing, source, incoming, operand))

    def copy(self, source: Block, target: Block) -> None:
        """Copy within this rank. A copy to itself is dropped; consecutive copies are merged."""
        if source == target or source.begin == source.end:
            return
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Copy) and _follows(source, last.source) and _follows(target, last.target):
            source, target = joined((last.source, source)), joined((last.target, target))
            self._steps.pop()
        self._steps.append(Copy(source, target))

    def scratch(self, length: int) -> Block:
        """Allocate scratch memory."""
        self._scratch += length
        return Block(SCRATCH, self._scratch - length, self._scratch)

    def schedule(self) -> Schedule:
        return Schedule(tuple(self._steps), self._scratch)


def _follows(block: Block, other: Block) -> bool:
    return block.begin == other.end and block.memory == other.memory


class Lengths(NamedTuple):
    """The lengths of the arrays of a call, in elements.

    `counts` are the lengths of the ranks' blocks (of the array's equal parts in an all_reduce, reduce or broadcast). In
    an all_to_all they are the lengths that this rank sends, and `recv_counts` those that it receives.
    """

    counts: tuple[int, ...]
    recv_counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.counts)


def even(count: int, parts: int) -> tuple[int, ...]:
    """Divide `count` into parts that differ by at most one, longer parts first."""
    share, rest = divmod(count, parts)
    return (share + 1,) * rest + (share,) * (parts - rest)


class Formula(str):
    """A cost formula, readable and callable: `Formula("S - S / n")(5, 1000)` is 800.

    n is the number of ranks, p the largest power of two up to n, S the elements of the larger array. bits(n) counts the
    one bits of all numbers below n.
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


Rounds = Callable[[int, float], Iterable[CostTerm]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A function over a port, with its costs.

    `steps` is the longest chain of dependent exchanges. `sent` and `scratch` are the elements that a rank sends and
    allocates at most, if the array divides evenly. `rounds` is the cost in closed form, of ranks and elements.
    """

    name: str
    collective: str
    function: Callable[..., None]
    steps: Formula
    sent: Formula
    scratch: Formula
    rounds: Rounds
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
    rounds: Rounds,
    scratch: str = "0",
    equal_blocks: bool = False,
    in_place: bool = True,
) -> Callable[[Callable[..., None]], Algorithm]:
    """Register a function in ALGORITHMS with its costs, as `Algorithm` has them.

    `equal_blocks`: all blocks must have one length. `in_place`: input and output may share memory.
    """

    def register(function: Callable[..., None]) -> Algorithm:
        formulas = Formula(steps), Formula(sent), Formula(scratch)
        registered = Algorithm(name, collective, function, *formulas, rounds, equal_blocks, in_place)
        names = ALGORITHMS.setdefault(collective, {})
        assert name not in names, f"duplicate algorithm {name} for {collective}"
        names[name] = registered
        return registered

    return register


@lru_cache(maxsize=512)
def record(algorithm: Algorithm, rank: int, size: int, lengths: Lengths, root: int = 0) -> Schedule:
    """Return the schedule of `rank` among at least two ranks. IN is the input of the rank, OUT its output, as types.def
    has them: the whole array, this rank's block, or all blocks.

    Where every rank gets an array, or the blocks of all, that its input is part of (all_reduce, broadcast, all_gather),
    the algorithm has OUT alone, which holds the input from the start. Others have both, and the root, if there is one.
    What a rank gives to itself stands in OUT from the start too: its block in a gather, all_to_all and, on the root, a
    scatter.
    """
    row, port = COLLECTIVES[algorithm.collective], Port(rank, size)
    received = lengths.recv_counts or lengths.counts
    given, got = _argument(row.given, IN, rank, lengths.counts), _argument(row.got, OUT, rank, received)
    arrays = [got] if row.starts_in_result else [given, got]
    algorithm.function(port, *(each for each in arrays if each is not None), *([root] if row.rooted else []))
    return port.schedule()


def _argument(data: str, memory: int, rank: int, counts: Sequence[int]) -> Block | list[Block] | None:
    """Return what an algorithm takes for the data of a column of types.def."""
    whole = Block(memory, 0, sum(counts))
    match data:
        case "ARRAY":
            return whole
        case "BLOCK":
            return Block(memory, 0, counts[rank])
        case "BLOCKS":
            return whole.split(counts)
    return None
