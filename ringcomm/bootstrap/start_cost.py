"""The cost of a start: what the server of the store, its link, and each rank take, where every rank has a core.

The ranks run already: what the processes take to start, and to import Python modules, comes before. The constants were
measured on two cores of an AMD EPYC: docs/simulate.md (*Predicted and measured*).
"""

from typing import NamedTuple

__all__ = ["StartCost", "start_cost"]

SERVED_BETWEEN_HOSTS = 0.27e-3  # seconds of the server for a rank that joins, with the handshake, and gathers facts
SERVED_ON_ONE_HOST = 0.07e-3
FACT_BYTES = 90  # that the first rank of a host reads for each rank of the job
RANK = 6.4e-3  # seconds of a rank
PEER = 0.13e-3  # seconds of a rank for another one that it connects to, by sockets or in the memory of its host


class StartCost(NamedTuple):
    """The parts of a start, one after another, in seconds."""

    server: float  # the server of the store takes one rank after another
    facts: float  # what it sends leaves through the link of its host
    rank: float  # a rank, side by side with the others


def start_cost(hosts: int, local: int, connections: int, byte_time: float) -> StartCost:
    """Return the cost of a start on `hosts` of `local` ranks, each of which makes so many connections to other hosts.

    One rank of each host reads the facts of all, over links that take `byte_time` seconds per byte.
    """
    ranks = hosts * local
    served = SERVED_BETWEEN_HOSTS if hosts > 1 else SERVED_ON_ONE_HOST
    sent = ranks * FACT_BYTES * (hosts - 1)  # its own host reads them too, but not over the link
    return StartCost(ranks * served, sent * byte_time, RANK + PEER * (local - 1 + connections))
