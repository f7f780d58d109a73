"""The chain: the array passes from rank to rank in pieces, of which each rank sends one while it receives the next.

Worringen, "Pipelining and overlapping for MPI collective operations", IEEE Conf. on Local Computer Networks (2003).
"""

from itertools import pairwise

from ringcomm.algorithms.schedule import Block, Formula, Port, algorithm, even

__all__ = ["broadcast"]

# Few pieces keep the last rank waiting, many take many steps. If a step takes a, and each element b more, then k pieces
# take (n - 2 + k) (a + b S / k), which is least at this k. 4,096 stands for a / b: the float32 that a link of 1.6 GB/s
# moves in the 10 µs that Python may take for a step.
PIECES = Formula("max(1, ceil(sqrt((n - 2) * S / 4096)))")


@algorithm("chain", "broadcast", steps=f"n - 2 + {PIECES}", sent="S")
def broadcast(port: Port, data: Block, root: int) -> None:
    """Every rank gets the array piece by piece from the one before, and passes it on to the next.

    On 5 ranks, each piece goes 0 → 1 → 2 → 3 → 4. No rank sends more than the array once, so for long arrays.
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
