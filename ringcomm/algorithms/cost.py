"""The cost of a call in a model of the cluster, of its recorded schedules or by a closed form.

A message takes the latency of its link, plus a time per byte; reducing or copying takes a time per byte too (Hockney,
"The communication challenge for MPP", Parallel Computing 20 (1994)). Links within a node and between nodes differ. All
ranks start together; the cost is the time at which the last rank is done.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ringcomm.algorithms.closed_forms import CostTerm
from ringcomm.algorithms.schedule import Algorithm
from ringcomm.algorithms.schedule_table import ScheduleTable

__all__ = ["CLUSTER", "Cluster", "LinkCost", "algorithm_cost", "closed_form_cost", "schedule_cost"]


class LinkCost(NamedTuple):
    """The cost of a message: latency + byte_time · bytes."""

    latency: float  # seconds
    byte_time: float  # seconds per byte


class Cluster(NamedTuple):
    """Nodes of `ranks` consecutive ranks each."""

    intra_node: LinkCost
    inter_node: LinkCost  # each node has one per direction, shared by its ranks
    work_byte_time: float  # seconds per byte that a rank reduces or copies
    ranks: int
    flow_byte_time: float = 0  # seconds per byte over the connections of two ranks on different nodes; 0: no limit


# Between nodes: the overhead of Python and MPI per message, and most of a 100 Gbit/s network. Within a node: the same
# without the network. A core reduces about as fast as it copies.
CLUSTER = Cluster(
    intra_node=LinkCost(10e-6, 1 / 10e9), inter_node=LinkCost(20e-6, 1 / 10e9), work_byte_time=1 / 10e9, ranks=1
)


def schedule_cost(table: ScheduleTable, item: float, cluster: Cluster) -> float:
    """Return the seconds until all ranks are done; `item` is the bytes of an element.

    A transfer starts when both of its ranks are ready, and takes latency + byte_time · bytes. The two halves of an
    exchange run at the same time; the receiver then reduces, and the rank continues when both halves are done. The m
    transfers of a wave that leave or enter one node share its link: each takes m · byte_time per byte, or longer where
    the connections of its two ranks carry less. Transfers of different waves do not share, even if they overlap in
    time.
    """
    node = np.arange(len(table.steps)) // cluster.ranks
    ready = np.zeros(len(node))  # when each rank began its step
    done = np.zeros(len(node))  # when the transfers of that step so far are done
    for wave in table.waves():
        of, to = wave.senders, wave.receivers
        out = node[of] != node[to]
        left, entered = (np.bincount(node[ranks[out]], minlength=len(node)) for ranks in (of, to))
        sharing = np.maximum(left[node[of]], entered[node[to]])
        latency = np.where(out, cluster.inter_node.latency, cluster.intra_node.latency)
        shared = np.maximum(cluster.inter_node.byte_time * sharing, cluster.flow_byte_time)
        byte_time = np.where(out, shared, cluster.intra_node.byte_time)
        arrived = np.maximum(ready[of], ready[to]) + latency + byte_time * (wave.length * item)
        done[of] = np.maximum(done[of], arrived)
        done[to] = np.maximum(done[to], arrived + cluster.work_byte_time * (wave.reduced * item))
        done[wave.done] += cluster.work_byte_time * (wave.copied * item)
        ready[wave.done] = done[wave.done]
    return float(done.max())


def closed_form_cost(terms: Iterable[CostTerm], size: int, item: float, cluster: Cluster) -> float:
    """Return the seconds that these terms take on `size` ranks; `item` is the bytes of an element.

    Equal to `schedule_cost` if all links are alike and none is shared, else an upper bound: no rank starts a round
    before all ranks have finished the previous one.
    """
    total = 0.0
    for rounds, elements, span, senders, work in terms:
        if span == 1:
            latency, byte_time = 0.0, 0.0
        elif size <= cluster.ranks or cluster.ranks % span == 0:
            latency, byte_time = cluster.intra_node
        else:
            latency, byte_time = cluster.inter_node
            byte_time = max(byte_time * min(senders, cluster.ranks), cluster.flow_byte_time)
        total += rounds * (latency + (byte_time * elements + cluster.work_byte_time * work) * item)
    return total


def algorithm_cost(algorithm: Algorithm, size: int, elements: float, item: float, cluster: Cluster) -> float:
    """Return the `closed_form_cost` of an algorithm for `elements` in the larger array."""
    return closed_form_cost(algorithm.rounds(size, elements), size, item, cluster)
