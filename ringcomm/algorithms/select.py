"""Select the algorithm of a call: the cheapest by its closed form."""

from functools import lru_cache
from typing import NamedTuple

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.closed_forms import CostTerm
from ringcomm.algorithms.cost import CLUSTER, Cluster, LinkCost, algorithm_cost, closed_form_cost
from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm, Lengths
from ringcomm.errors import unknown

__all__ = ["AlgorithmSelector", "check_name", "hierarchical_cost", "is_slow", "select"]

SLOW_LINK = 1 / 0.25e9  # seconds per byte
ABOUT = 0.01  # costs that differ by less are about the same


def check_name(name: str | None) -> None:
    """Raise ArgumentError unless `name` is None or the name of an algorithm."""
    known = sorted({each for named in ALGORITHMS.values() for each in named})
    if name is not None and name not in known:
        raise unknown("algorithm", name, known)


class AlgorithmSelector(NamedTuple):
    """Selects by name if an algorithm of that name supports the call, else by cost."""

    name: str | None
    cluster: Cluster
    slow: bool = False  # the link between nodes is

    def sharing(self, groups: int) -> "AlgorithmSelector":
        """Return the selector of one of `groups` groups that share the links between nodes."""
        latency, byte_time = self.cluster.inter_node
        return self._replace(cluster=self.cluster._replace(inter_node=LinkCost(latency, byte_time * groups)))

    def of(self, collective: str, size: int, lengths: Lengths, item: int) -> Algorithm:
        """Return the algorithm for a call of `size` ranks; `item` is the bytes of an element.

        With `recv_counts` the lengths differ between ranks, so the result depends on the collective only.
        """
        if lengths.recv_counts:
            return pairwise.all_to_all
        equal_blocks = len({*lengths.counts}) == 1
        named = ALGORITHMS[collective].get(self.name or "")
        if named and (equal_blocks or not named.equal_blocks):
            return named
        return select(collective, size, lengths.total, item, self.cluster, equal_blocks, self.slow)


def is_slow(link: LinkCost) -> bool:
    """Return whether what moves over a link takes longer than all else."""
    return link.byte_time >= SLOW_LINK


@lru_cache(maxsize=4096)
def select(
    collective: str,
    size: int,
    elements: float,
    item: int,
    cluster: Cluster = CLUSTER,
    equal_blocks: bool = True,
    slow: bool = False,
) -> Algorithm:
    """Return the cheapest algorithm for `elements` of `item` bytes in the larger array, on `size` ranks.

    Over a slow link, of those that cost about the same, the one whose ranks change their peers the least often: ranks
    are never quite in step, and what two peers send at once shares the link of the receiver, so both are late. A ring
    has one sender for each receiver. (Four hosts at 1 Gbit/s, 16 MiB: 213 ms by ring, 216 to 276 by halving_doubling.)
    Two ranks have no other peers.

    The result depends on the arguments only, so all ranks select the same. Without `equal_blocks`, algorithms that need
    blocks of one length are excluded.
    """
    found = ALGORITHMS[collective].values()
    fitting = [algorithm for algorithm in found if equal_blocks or not algorithm.equal_blocks]
    costs = {algorithm: algorithm_cost(algorithm, size, elements, item, cluster) for algorithm in fitting}
    best = min(fitting, key=lambda algorithm: costs[algorithm])
    if size == 2 or not slow:
        return best
    near = [algorithm for algorithm in fitting if costs[algorithm] <= costs[best] * (1 + ABOUT)]
    return min(near, key=lambda algorithm: (_phases(algorithm, size, elements), costs[algorithm]))


def _phases(algorithm: Algorithm, size: int, elements: float) -> int:
    """Return the number of terms of the closed form: in those of large arrays, a rank has one peer in each."""
    return sum(term.span > 1 for term in algorithm.rounds(size, elements))


def hierarchical_cost(nodes: int, elements: float, item: int, cluster: Cluster) -> float:
    """Return the seconds of a hierarchical all_reduce: reduce-scatter in each node, all_reduce of each share between
    the nodes, all-gather in each node.

    Within a node the ranks read each other's memory: one step, in which each reads a share of every other rank. A stage
    starts when the previous one has ended on all ranks.
    """
    local = cluster.ranks
    share = elements / local
    across = cluster._replace(
        inter_node=cluster.inter_node._replace(byte_time=cluster.inter_node.byte_time * local), ranks=1
    )
    rest = elements - share
    inside = [CostTerm(1, rest, local, senders=0, work=rest), CostTerm(1, rest, local, senders=0)] if local > 1 else []
    best = select("all_reduce", nodes, share, item, across, slow=is_slow(cluster.inter_node))
    return closed_form_cost(inside, local, item, cluster) + algorithm_cost(best, nodes, share, item, across)
