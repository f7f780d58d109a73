"""Bruck's algorithms: in round k each rank exchanges with the ranks 2 ** k away, and forwards the blocks it holds.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE Transactions on Parallel and Distributed Systems 8 (1997).
"""

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Port, algorithm, joined

__all__ = ["all_gather", "all_to_all"]


@algorithm(
    "bruck",
    "all_gather",
    steps="ceil(log2(n))",
    sent="S - S / n",
    scratch="S",
    rounds=closed_forms.bruck_all_gather,
)
def all_gather(port: Port, blocks: list[Block]) -> None:
    """A rank that holds k consecutive blocks, its own first, gets the next k from the rank k positions ahead.

    On 5 ranks, rank 0 gets block 1 from rank 1, blocks 2 and 3 from rank 2, and block 4 from rank 4. Fewest steps: best
    for short blocks.
    """
    n, rank = port.size, port.rank
    order = [*blocks[rank:], *blocks[:rank]]
    # In this order each rank sends and receives one contiguous block.
    found = port.scratch(sum(block.length for block in order)).split([block.length for block in order])
    port.copy(order[0], found[0])
    have = 1
    while have < n:
        more = min(have, n - have)
        port.exchange(joined(found[:more]), (rank - have) % n, joined(found[have : have + more]), (rank + have) % n)
        have += more
    for block, target in zip(found[1:], order[1:], strict=True):
        port.copy(block, target)


@algorithm(
    "bruck",
    "all_to_all",
    steps="ceil(log2(n))",
    sent="S / n * bits(n)",
    scratch="S + 2 * S / n * (n // 2)",
    rounds=closed_forms.bruck_all_to_all,
    equal_blocks=True,
)
def all_to_all(port: Port, blocks: list[Block], out: list[Block]) -> None:
    """A block for the rank d positions ahead makes one hop for each bit set in d.

    On 5 ranks, the block of rank 0 for rank 3 goes 0 → 1 → 3, together with the other blocks that hop 1, then 2 ranks.
    Fewest steps: best for short blocks. Each step sends about half of the array. All blocks must have one length.
    """
    n, rank, length = port.size, port.rank, blocks[0].length
    # by_distance[d] holds the block that travels d ranks, from any rank.
    by_distance = port.scratch(n * length).split([length] * n)
    packed, arrived = (port.scratch(n // 2 * length) for _ in range(2))
    for d in range(n):
        port.copy(blocks[(rank + d) % n], by_distance[d])
    step = 1
    while step < n:
        moving = [joined(by_distance[d : d + step]) for d in range(step, n, 2 * step)]
        lengths = [block.length for block in moving]
        outgoing, incoming = packed.part(0, sum(lengths)), arrived.part(0, sum(lengths))
        for block, packing in zip(moving, outgoing.split(lengths), strict=True):
            port.copy(block, packing)
        port.exchange(outgoing, (rank + step) % n, incoming, (rank - step) % n)
        for block, packing in zip(moving, incoming.split(lengths), strict=True):
            port.copy(packing, block)
        step *= 2
    for d in range(1, n):
        port.copy(by_distance[d], out[(rank - d) % n])
