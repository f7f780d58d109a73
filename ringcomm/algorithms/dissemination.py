"""The dissemination barrier.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17 (1988).
"""

from ringcomm.algorithms import closed_forms
from ringcomm.algorithms.schedule import Port, algorithm

__all__ = ["barrier"]


@algorithm("dissemination", "barrier", steps="ceil(log2(n))", sent="0", rounds=closed_forms.dissemination)
def barrier(port: Port) -> None:
    """In step k each rank signals the rank 2 ** k ahead; at the end it has a direct or indirect signal from all.

    On 5 ranks, rank 0 gets a signal from 4; then from 3, which implies 2; then from 1, which implies 0, 4 and 3.
    """
    n, rank = port.size, port.rank
    empty = port.scratch(0)
    distance = 1
    while distance < n:
        port.exchange(empty, (rank + distance) % n, empty, (rank - distance) % n)
        distance *= 2
