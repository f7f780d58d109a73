"""The time of a pipeline in closed form, for the search. The other way is to run the table that `Pipeline` executes.

All stages take the same time except the last, which computes the logits too. A transfer runs beside the computation of
both of its ranks.
"""

__all__ = ["pipeline_seconds"]


def pipeline_seconds(p: int, m: int, v: int, stage: float, extra: float, transfer: float) -> float:
    """Return the seconds of m micro-batches on p ranks of v chunks: 1F1B if v = 1, else interleaved 1F1B.

    Without `extra` and `transfer` the bubble is (p-1)/m and (p-1)/(v·m) of the compute time (Narayanan et al., arXiv
    2104.04473, section 2.2). With n = m - 1, 1F1B takes ::

        (p - 1)(stage + 2 transfer) + m stage + (1 + ⌈n/p⌉) extra + (n - ⌈n/p⌉) max(extra, 2 transfer)

    because a rank that has as many micro-batches in flight as ranks follow it waits for each round trip, unless it
    waits for the last rank anyway. The interleaved schedule has more in flight, so only the way in and out costs
    transfers, if they are short beside the time of a chunk.

    Args:
        p: ranks
        m: micro-batches
        v: chunks of a rank
        stage: seconds of forward and backward of all layers of a rank, for one micro-batch
        extra: seconds more on the last rank
        transfer: seconds in which an activation, or its gradient, goes to the next rank
    """
    if p == 1:
        return m * (stage + extra)
    if v > 1:
        return m * (stage + extra) + (p - 1) * stage / v + 2 * (p * v - 1) * transfer
    trips = -(-(m - 1) // p)
    steady = (1 + trips) * extra + (m - 1 - trips) * max(extra, 2 * transfer)
    return (p - 1) * (stage + 2 * transfer) + m * stage + steady
