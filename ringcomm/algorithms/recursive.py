"""Recursive doubling and halving: in round k each rank exchanges with the rank whose number differs in bit k.

This needs a power of two ranks. The ranks beyond it first send their arrays to a neighbor, and get the result last.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Performance
Computing Applications 19 (2005).
"""

from collections.abc import Callable

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Port, algorithm, even

__all__ = ["doubling", "halving_doubling"]

Core = Callable[[Port, Block, int, list[int]], None]


@algorithm(
    "recursive_doubling",
    "all_reduce",
    steps="log2(p) + 2 * (p < n)",
    sent="S * log2(p) + S * (p < n)",
    scratch="S",
    rounds=closed_forms.doubling,
)
def doubling(port: Port, data: Block) -> None:
    """Partners exchange and add whole arrays; each round doubles the number of ranks in each sum.

    On 5 ranks, 1 → 0; then 0 ↔ 2 and 3 ↔ 4, then 0 ↔ 3 and 2 ↔ 4; then 0 → 1. Fewest steps: best for short arrays. Both
    partners add the lower rank's share first, so all ranks get the same bits.
    """
    _among_power_of_two(port, data, _double)


def _double(port: Port, data: Block, me: int, ranks: list[int]) -> None:
    # The outgoing block cannot be overwritten, so the sum alternates between two memories.
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
    rounds=closed_forms.halving_doubling,
)
def halving_doubling(port: Port, data: Block) -> None:
    """Rabenseifner's algorithm: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    On 5 ranks, 1 → 0; then 0 ↔ 3 and 2 ↔ 4 exchange halves, 0 ↔ 2 and 3 ↔ 4 quarters: each has the sum of one quarter.
    Then 0 ↔ 2 and 3 ↔ 4 exchange quarters, 0 ↔ 3 and 2 ↔ 4 halves; then 0 → 1. On a power of two ranks it sends as few
    elements as a ring, in fewer steps.
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
    """Call `core` on a power of two ranks, with the index of this rank among them; their sum covers all ranks."""
    n, rank = port.size, port.rank
    paired = 2 * (n - (1 << n.bit_length() - 1))  # below this, an odd rank sends its array to the previous rank
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
