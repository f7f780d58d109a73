"""Recursive doubling and halving: in round k a rank meets the one whose number differs in bit k.

That needs a power of two ranks. Those beyond it hand their arrays to a neighbour first, and get the result last.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Performance
Computing Applications 19 (2005).
"""

from collections.abc import Callable

from ringcomm.algorithms.schedule import Block, Port, algorithm, even

__all__ = ["doubling", "halving_doubling"]

Core = Callable[[Port, Block, int, list[int]], None]


@algorithm(
    "recursive_doubling",
    "all_reduce",
    steps="log2(p) + 2 * (p < n)",
    sent="S * log2(p) + S * (p < n)",
    scratch="S",
)
def doubling(port: Port, data: Block) -> None:
    """Partners exchange whole arrays and both add them; each round doubles the ranks whose arrays are in the sum.

    On 5 ranks, rank 1 hands over to 0; then 0 ↔ 2 and 3 ↔ 4, then 0 ↔ 3 and 2 ↔ 4; then 0 tells 1. Fewest steps, so for
    short arrays. Of each pair the share of the lower rank comes first, so that all ranks end with the same bits.
    """
    _among_power_of_two(port, data, _double)


def _double(port: Port, data: Block, me: int, ranks: list[int]) -> None:
    # What is sent cannot be written over, so the sum moves from one memory to the other and back.
    now, then = data, port.scratch(data.length)
    distance = 1
    while distance < len(ranks):
        peer = ranks[me ^ distance]
        port.exchange(now, peer, then, peer, operand=now)
        now, then = then, now
        distance *= 2
    port.copy(now, data)


@algorithm(
    "halving_doubling",
    "all_reduce",
    steps="2 * log2(p) + 2 * (p < n)",
    sent="2 * (S - S / p) + S * (p < n)",
)
def halving_doubling(port: Port, data: Block) -> None:
    """Partners halve what they add up until each rank has the sum of one part; then they collect the parts in reverse.

    On 5 ranks, rank 1 hands over to 0; then 0 ↔ 3 and 2 ↔ 4 exchange halves, 0 ↔ 2 and 3 ↔ 4 quarters: each has the sum
    of one. Then 0 ↔ 2 and 3 ↔ 4 exchange these, 0 ↔ 3 and 2 ↔ 4 halves; then 0 tells 1. As few elements as a ring in
    fewer steps, where the ranks are a power of two. This is Rabenseifner's algorithm.
    """
    _among_power_of_two(port, data, _halve_and_double)


def _halve_and_double(port: Port, data: Block, me: int, ranks: list[int]) -> None:
    rounds = []
    distance = len(ranks) // 2
    while distance:
        mine, theirs = data.split(even(data.length, 2))
        if me & distance:
            mine, theirs = theirs, mine
        rounds.append((ranks[me ^ distance], mine, theirs))
        data = mine
        distance //= 2
    for peer, mine, theirs in rounds:
        port.exchange(theirs, peer, mine, peer, operand=mine)
    for peer, mine, theirs in reversed(rounds):
        port.exchange(mine, peer, theirs, peer)


def _among_power_of_two(port: Port, data: Block, core: Core) -> None:
    """Call `core` on a power of two ranks, with the place of this rank among them; their sum is that of all."""
    n, rank = port.size, port.rank
    paired = 2 * (n - (1 << n.bit_length() - 1))  # below this, an odd rank leaves its array to the even one before it
    if rank < paired and rank % 2:
        port.send(data, rank - 1)
        port.recv(data, rank - 1)
        return
    if rank < paired:
        port.recv(data, rank + 1, operand=data)
    ranks = [*range(0, paired, 2), *range(paired, n)]
    core(port, data, ranks.index(rank), ranks)
    if rank < paired:
        port.send(data, rank + 1)
