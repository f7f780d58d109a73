"""The chain, a pipelined broadcast: each rank sends one piece of the array while it receives the next.

Worringen, "Pipelining and overlapping for MPI collective operations", IEEE Conf. on Local Computer Networks (2003).
"""

from collections.abc import Iterator
from itertools import pairwise

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Formula, Port, algorithm, even

__all__ = ["broadcast"]

# Few pieces delay the last rank, many take many steps. With a latency a per step and a time b per element, k pieces
# take (n - 2 + k) (a + b S / k), which is least at this k. 4,096 stands for a / b: the float32 elements that a link of
# 1.6 GB/s moves in 10 µs, the overhead of a step in Python.
PIECES = Formula("max(1, ceil(sqrt((n - 2) * S / 4096)))")


def _rounds(size: int, elements: float) -> Iterator[closed_forms.CostTerm]:
    return closed_forms.chain(size, elements, int(PIECES(size, int(elements))))


@algorithm("chain", "broadcast", steps=f"n - 2 + {PIECES}", sent="S", rounds=_rounds)
def broadcast(port: Port, data: Block, root: int) -> None:
    """Each rank receives the array piece by piece from the previous rank, and forwards it to the next.

    On 5 ranks, each piece goes 0 → 1 → 2 → 3 → 4. No rank sends the array more than once: best for long arrays.
    """
    n, rank = port.size, port.rank
    pieces = data.split(even(data.length, int(PIECES(n, data.length))))
    before, after = (rank - 1) % n, (rank + 1) % n
    if rank == root:
        for piece in pieces:
            port.send(piece, after)
    elif after == root:
        for piece in pieces:
            port.recv(piece, before)
    else:
        port.recv(pieces[0], before)
        for here, coming in pairwise(pieces):
            port.exchange(here, after, coming, before)
        port.send(pieces[-1], after)
