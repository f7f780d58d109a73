"""The dissemination barrier.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17 (1988).
"""

from ringcomm.algorithms.schedule import Port, algorithm

__all__ = ["barrier"]


@algorithm("dissemination", "barrier", steps="ceil(log2(n))", sent="0")
def barrier(port: Port) -> None:
    """In step k each rank signals the one 2^k ahead; in the end it has heard, directly or through others, of all.

    On 5 ranks, rank 0 hears from 4, who has come; then from 3, who has heard from 2; then from 1, who has heard from 0,
    4 and 3.
    """
    n, rank = port.size, port.rank
    nothing = port.scratch(0)
    distance = 1
    while distance < n:
        port.exchange(nothing, (rank + distance) % n, nothing, (rank - distance) % n)
        distance *= 2
