"""The ring: every rank sends to the next one and receives from the one before, in every step.

Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69 (2009): no algorithm sends less than 2 (n - 1) / n of the array, and a ring keeps every link busy all the time.
"""

from ringcomm.algorithms.schedule import Block, Port, algorithm, even

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


@algorithm(
    "ring",
    "reduce_scatter",
    steps="n - 1",
    sent="S - S / n",
    scratch="2 * S / n if n > 2 else 0",
)
def reduce_scatter(port: Port, blocks: list[Block], out: Block) -> None:
    """The sum of a block travels once around the ring, and ends where it belongs; each rank adds its own share to it.

    On 5 ranks, block 0 starts on rank 1 and goes 1 → 2 → 3 → 4 → 0; rank 0 adds its own and has the sum of all.
    """
    n, rank = port.size, port.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    longest = max(block.length for block in blocks)
    # What comes in one step leaves in the next, while something else comes.
    sums = [port.scratch(longest) for _ in range(2)] if n > 2 else []
    outgoing = blocks[left]
    for step in range(n - 1):
        own = blocks[(rank - 2 - step) % n]
        incoming = out if step == n - 2 else sums[step % 2].part(0, own.length)
        port.exchange(outgoing, right, incoming, left, operand=own)
        outgoing = incoming


@algorithm("ring", "all_gather", steps="n - 1", sent="S - S / n")
def all_gather(port: Port, blocks: list[Block]) -> None:
    """Every block travels around the ring; each rank keeps it and passes it on.

    On 5 ranks, block 0 goes 0 → 1 → 2 → 3 → 4.
    """
    n, rank = port.size, port.rank
    for step in range(n - 1):
        port.exchange(blocks[(rank - step) % n], (rank + 1) % n, blocks[(rank - 1 - step) % n], (rank - 1) % n)


@algorithm("ring", "all_reduce", steps="2 * (n - 1)", sent="2 * (S - S / n)")
def all_reduce(port: Port, data: Block) -> None:
    """Reduce-scatter, then all-gather; the sums grow in the array itself.

    On 5 ranks, block 0 goes 1 → 2 → 3 → 4 → 0 and grows, then 0 → 1 → 2 → 3 → 4 to be kept.
    """
    n, rank = port.size, port.rank
    blocks = data.split(even(data.length, n))
    for step in range(n - 1):
        own = blocks[(rank - 2 - step) % n]
        port.exchange(blocks[(rank - 1 - step) % n], (rank + 1) % n, own, (rank - 1) % n, operand=own)
    all_gather.tell(port, blocks)
