"""The ring: in each step, each rank sends to the next rank and receives from the previous one.

Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput.
69 (2009): no all_reduce sends less than 2 (n - 1) / n of the array, and a ring keeps all links busy.
"""

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Block, Port, algorithm, even

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


@algorithm(
    "ring",
    "reduce_scatter",
    steps="n - 1",
    sent="S - S / n",
    scratch="2 * S / n if n > 2 else 0",
    rounds=closed_forms.reducing_ring,
)
def reduce_scatter(port: Port, blocks: list[Block], out: Block) -> None:
    """The partial sum of each block travels once around the ring to its destination; each rank adds its share.

    On 5 ranks, block 0 goes 1 → 2 → 3 → 4 → 0; rank 0 adds its own share and has the total.
    """
    n, rank = port.size, port.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    longest = max(block.length for block in blocks)
    # A sum received in one step is sent in the next, while another arrives.
    sums = [port.scratch(longest) for _ in range(2)] if n > 2 else []
    outgoing = blocks[left]
    for step in range(n - 1):
        own = blocks[(rank - 2 - step) % n]
        incoming = out if step == n - 2 else sums[step % 2].part(0, own.length)
        port.exchange(outgoing, right, incoming, left, operand=own)
        outgoing = incoming


@algorithm("ring", "all_gather", steps="n - 1", sent="S - S / n", rounds=closed_forms.ring)
def all_gather(port: Port, blocks: list[Block]) -> None:
    """Each block travels around the ring; each rank stores and forwards it.

    On 5 ranks, block 0 goes 0 → 1 → 2 → 3 → 4.
    """
    n, rank = port.size, port.rank
    for step in range(n - 1):
        port.exchange(blocks[(rank - step) % n], (rank + 1) % n, blocks[(rank - 1 - step) % n], (rank - 1) % n)


@algorithm("ring", "all_reduce", steps="2 * (n - 1)", sent="2 * (S - S / n)", rounds=closed_forms.ring_all_reduce)
def all_reduce(port: Port, data: Block) -> None:
    """Reduce-scatter, then all-gather, with the sums in the array itself: best for long arrays.

    On 5 ranks, block 0 goes 1 → 2 → 3 → 4 → 0 to be reduced, then 0 → 1 → 2 → 3 → 4 to be stored.
    """
    n, rank = port.size, port.rank
    blocks = data.split(even(data.length, n))
    for step in range(n - 1):
        own = blocks[(rank - 2 - step) % n]
        port.exchange(blocks[(rank - 1 - step) % n], (rank + 1) % n, own, (rank - 1) % n, operand=own)
    all_gather.function(port, blocks)
