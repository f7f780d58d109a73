"""The algorithms in closed form: the rounds in which the slowest rank is done, on any number of ranks.

Some hundreds of ranks can be recorded, 100,000 cannot; and whoever chooses among algorithms wants no recording. The
rows are for arrays that divide evenly, and take it that a rank copies a block in less time than it sends it.
"""

# ruff: noqa: N803 (S, as in the formulas)

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ringcomm.algorithms.chain import PIECES

__all__ = ["ROUNDS", "Rounds"]


class Rounds(NamedTuple):
    """`times` rounds in a row that cost alike: in each, the slowest rank exchanges so many elements with another one.

    `within`: both are in one of the groups into which that many ranks each divide all; 1: nothing is exchanged.
    `lanes`: how many ranks of a node send to other nodes at most, however many it has; as many receive.
    """

    times: int
    elements: float
    within: int
    lanes: int
    worked: float = 0  # elements that the rank then reduces or copies

    @staticmethod
    def of_work(elements: float) -> "Rounds":
        return Rounds(1, 0, within=1, lanes=0, worked=elements)


def ring(n: int, S: float, worked: float = 0) -> Iterator[Rounds]:
    yield Rounds(n - 1, S / n, n, lanes=1, worked=worked / n)


def ring_all_reduce(n: int, S: float) -> Iterator[Rounds]:
    yield from ring(n, S, worked=S)
    yield from ring(n, S)


def doubling(n: int, S: float) -> Iterator[Rounds]:
    rounds = n.bit_length() - 1
    yield from fold(n, S)
    yield from (Rounds(1, S, within(n, 2 << k), lanes=n, worked=S) for k in range(rounds))
    yield Rounds.of_work(S * (rounds % 2))  # back from scratch memory
    yield from unfold(n, S)


def halving_doubling(n: int, S: float) -> Iterator[Rounds]:
    rounds = n.bit_length() - 1
    yield from fold(n, S)
    shares = [(S / (2 << k), within(n, 1 << rounds - k)) for k in range(rounds)]
    yield from (Rounds(1, share, group, lanes=n, worked=share) for share, group in shares)
    yield from (Rounds(1, share, group, lanes=n) for share, group in reversed(shares))
    yield from unfold(n, S)


def fold(n: int, S: float) -> Iterator[Rounds]:
    """Beyond a power of two, ranks hand their arrays to a neighbour."""
    if not is_power_of_two(n):
        yield Rounds(1, S, 2, lanes=n, worked=S)


def unfold(n: int, S: float) -> Iterator[Rounds]:
    if not is_power_of_two(n):
        yield Rounds(1, S, 2, lanes=n)


def tree(n: int, S: float, worked: float = 0) -> Iterator[Rounds]:
    yield from (Rounds(1, S, within(n, part), lanes=1, worked=worked) for part in parts(n))


def tree_blocks(n: int, S: float) -> Iterator[Rounds]:
    yield from (Rounds(1, part // 2 * S / n, within(n, part), lanes=1) for part in parts(n))
    # Ranks that hand blocks on keep those in memory of their own. One of them is as late as the root, where two halves
    # of more than one rank are equal.
    if any(part % 2 == 0 for part in parts(n) if part > 2):
        yield Rounds.of_work(S / n)


def parts(n: int) -> Iterator[int]:
    """Yield the sizes of the parts that the root of a tree stands for, until it stands for itself."""
    while n > 1:
        yield n
        n = (n + 1) // 2


def chain(n: int, S: float) -> Iterator[Rounds]:
    pieces = int(PIECES(n, int(S)))
    yield Rounds(n - 2 + pieces, S / pieces, n, lanes=1)


def bruck_all_gather(n: int, S: float) -> Iterator[Rounds]:
    for k in range((n - 1).bit_length()):
        yield Rounds(1, min(1 << k, n - (1 << k)) * S / n, n, lanes=min(1 << k, n - (1 << k)))
    yield Rounds.of_work(S)  # into the order of distance, and back


def bruck_all_to_all(n: int, S: float) -> Iterator[Rounds]:
    for k in range((n - 1).bit_length()):
        whole, rest = divmod(n, 2 << k)
        moving = (whole << k) + max(0, rest - (1 << k))  # of the numbers below n, those with bit k
        yield Rounds(1, moving * S / n, n, lanes=min(1 << k, n - (1 << k)), worked=2 * moving * S / n)
    yield Rounds.of_work(2 * S - S / n)  # into the order of distance, and all but the own out of it


def pairwise(n: int, S: float) -> Iterator[Rounds]:
    yield from (Rounds(1, S / n, n, lanes=min(d, n - d)) for d in range(1, n))


def dissemination(n: int, _: float) -> Iterator[Rounds]:
    yield Rounds((n - 1).bit_length(), 0, n, lanes=n)


def within(n: int, group: int) -> int:
    """Return `group` if that divides the ranks, else all of them."""
    return group if is_power_of_two(n) else n


def is_power_of_two(n: int) -> bool:
    return n & n - 1 == 0


# By collective and name: functions of the ranks, and of the elements of the larger array.
ROUNDS: dict[tuple[str, str], Callable[[int, float], Iterator[Rounds]]] = {
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "recursive_doubling"): doubling,
    ("all_reduce", "halving_doubling"): halving_doubling,
    ("reduce_scatter", "ring"): lambda n, S: ring(n, S, worked=S),
    ("all_gather", "ring"): ring,
    ("all_gather", "bruck"): bruck_all_gather,
    ("broadcast", "tree"): tree,
    ("broadcast", "chain"): chain,
    ("reduce", "tree"): lambda n, S: tree(n, S, worked=S),
    ("gather", "tree"): tree_blocks,
    ("scatter", "tree"): tree_blocks,
    ("all_to_all", "pairwise"): pairwise,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("barrier", "dissemination"): dissemination,
}
