"""Pairwise exchange: in step d each rank sends to the rank d ahead and receives from the rank d behind."""

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Port, algorithm

__all__ = ["all_to_all"]


@algorithm("pairwise", "all_to_all", steps="n - 1", sent="S - S / n", rounds=closed_forms.pairwise, in_place=False)
def all_to_all(port: Port, blocks: list[Block], out: list[Block]) -> None:
    """Each block goes directly to its destination.

    On 5 ranks, rank 0 sends to 1, 2, 3, 4, and receives from 4, 3, 2, 1. Nothing is sent twice: best for long blocks.
    Not in place.
    """
    n, rank = port.size, port.rank
    for d in range(1, n):
        dest, source = (rank + d) % n, (rank - d) % n
        port.exchange(blocks[dest], dest, out[source], source)
