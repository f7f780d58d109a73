"""Costs in closed form: the rounds of the slowest rank, on any number of ranks, for n ranks and an array of S elements.

Recording is practical for some hundreds of ranks, not for 100,000, and too slow for selecting an algorithm per call.
The formulas hold for arrays that divide evenly, and assume that copying a block is faster than sending it.
"""

# ruff: noqa: N803 (S, as in the formulas)

from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "CostTerm",
    "bruck_all_gather",
    "bruck_all_to_all",
    "chain",
    "dissemination",
    "doubling",
    "halving_doubling",
    "pairwise",
    "reducing_ring",
    "reducing_tree",
    "ring",
    "ring_all_reduce",
    "tree",
    "tree_blocks",
]


class CostTerm(NamedTuple):
    """`rounds` consecutive rounds of equal cost, in each of which the slowest rank exchanges `elements` with a peer.

    `span`: the ranks are divided into groups of this many, and the peers are in one group; 1: no exchange. `senders`:
    the most ranks of a node that send to other nodes, whatever its size; as many receive.
    """

    rounds: int
    elements: float
    span: int
    senders: int
    work: float = 0  # elements that the rank then reduces or copies

    @staticmethod
    def of_work(elements: float) -> "CostTerm":
        return CostTerm(1, 0, span=1, senders=0, work=elements)


def ring(n: int, S: float, work: float = 0) -> Iterator[CostTerm]:
    yield CostTerm(n - 1, S / n, n, senders=1, work=work / n)


def reducing_ring(n: int, S: float) -> Iterator[CostTerm]:
    return ring(n, S, work=S)


def ring_all_reduce(n: int, S: float) -> Iterator[CostTerm]:
    yield from reducing_ring(n, S)
    yield from ring(n, S)


def doubling(n: int, S: float) -> Iterator[CostTerm]:
    rounds = n.bit_length() - 1
    yield from fold(n, S)
    yield from (CostTerm(1, S, within(n, 2 << k), senders=n, work=S) for k in range(rounds))
    yield CostTerm.of_work(S * (rounds % 2))  # the copy back from scratch memory
    yield from unfold(n, S)


def halving_doubling(n: int, S: float) -> Iterator[CostTerm]:
    rounds = n.bit_length() - 1
    yield from fold(n, S)
    shares = [(S / (2 << k), within(n, 1 << rounds - k)) for k in range(rounds)]
    yield from (CostTerm(1, share, group, senders=n, work=share) for share, group in shares)
    yield from (CostTerm(1, share, group, senders=n) for share, group in reversed(shares))
    yield from unfold(n, S)


def fold(n: int, S: float) -> Iterator[CostTerm]:
    """The ranks beyond a power of two send their arrays to a neighbor."""
    if not is_power_of_two(n):
        yield CostTerm(1, S, 2, senders=n, work=S)


def unfold(n: int, S: float) -> Iterator[CostTerm]:
    if not is_power_of_two(n):
        yield CostTerm(1, S, 2, senders=n)


def tree(n: int, S: float, work: float = 0) -> Iterator[CostTerm]:
    yield from (CostTerm(1, S, within(n, part), senders=1, work=work) for part in parts(n))


def reducing_tree(n: int, S: float) -> Iterator[CostTerm]:
    return tree(n, S, work=S)


def tree_blocks(n: int, S: float) -> Iterator[CostTerm]:
    yield from (CostTerm(1, part // 2 * S / n, within(n, part), senders=1) for part in parts(n))
    # Ranks that forward blocks keep them in scratch memory, and copy their own. One of them finishes as late as the
    # root if two halves of more than one rank are equal.
    if any(part % 2 == 0 for part in parts(n) if part > 2):
        yield CostTerm.of_work(S / n)


def parts(n: int) -> Iterator[int]:
    """Yield the sizes of the subtrees that the root of a tree represents, down to 2 ranks."""
    while n > 1:
        yield n
        n = (n + 1) // 2


def chain(n: int, S: float, pieces: int) -> Iterator[CostTerm]:
    yield CostTerm(n - 2 + pieces, S / pieces, n, senders=1)


def bruck_all_gather(n: int, S: float) -> Iterator[CostTerm]:
    for k in range((n - 1).bit_length()):
        yield CostTerm(1, min(1 << k, n - (1 << k)) * S / n, n, senders=min(1 << k, n - (1 << k)))
    yield CostTerm.of_work(S)  # into order of distance, and back


def bruck_all_to_all(n: int, S: float) -> Iterator[CostTerm]:
    for k in range((n - 1).bit_length()):
        whole, rest = divmod(n, 2 << k)
        moving = (whole << k) + max(0, rest - (1 << k))  # numbers below n with bit k set
        yield CostTerm(1, moving * S / n, n, senders=min(1 << k, n - (1 << k)), work=2 * moving * S / n)
    yield CostTerm.of_work(2 * S - S / n)  # into order of distance, and all but the own block back


def pairwise(n: int, S: float) -> Iterator[CostTerm]:
    yield from (CostTerm(1, S / n, n, senders=min(d, n - d)) for d in range(1, n))


def dissemination(n: int, _: float) -> Iterator[CostTerm]:
    yield CostTerm((n - 1).bit_length(), 0, n, senders=n)


def within(n: int, group: int) -> int:
    """Return `group` if groups of that size divide the ranks, else n."""
    return group if is_power_of_two(n) else n


def is_power_of_two(n: int) -> bool:
    return n & n - 1 == 0
