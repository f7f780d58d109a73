"""Pairwise exchange: in step d every rank sends to the one d on, and receives from the one d back."""

from ringcomm.algorithms.schedule import Block, Port, algorithm

__all__ = ["all_to_all"]


@algorithm("pairwise", "all_to_all", steps="n - 1", sent="S - S / n", in_place=False)
def all_to_all(port: Port, blocks: list[Block], out: list[Block]) -> None:
    """Every block goes straight to where it belongs.

    On 5 ranks, rank 0 sends to 1, 2, 3, 4, and receives from 4, 3, 2, 1. Nothing is sent twice, so for long blocks.
    """
    n, rank = port.size, port.rank
    for d in range(1, n):
        dest, source = (rank + d) % n, (rank - d) % n
        port.exchange(blocks[dest], dest, out[source], source)
