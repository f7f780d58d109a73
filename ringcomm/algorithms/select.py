"""Which algorithm a call takes: the cheapest by its closed form."""

from functools import lru_cache
from typing import NamedTuple

from ringcomm.algorithms import pairwise
from ringcomm.algorithms.cost import CLUSTER, Cluster, Link, bound, closed_form
from ringcomm.algorithms.rounds import Rounds
from ringcomm.algorithms.schedule import ALGORITHMS, Algorithm, Lengths
from ringcomm.errors import unknown

__all__ = ["MPI", "Choice", "check_name", "hierarchy", "select"]

MPI = "mpi"  # in place of the name of an algorithm: what MPI itself does


def check_name(name: str) -> None:
    """Refuse what is neither empty, nor MPI, nor the name of an algorithm."""
    known = [MPI, *sorted({each for named in ALGORITHMS.values() for each in named})]
    if name and name not in known:
        raise unknown("algorithm", name, known)


class Choice(NamedTuple):
    """How a group chooses: by name where there is an algorithm of that name that can do a call, else by price."""

    name: str
    cluster: Cluster

    def sharing(self, lanes: int) -> "Choice":
        """Return the choice for one of so many groups that use the links at once."""
        alpha, beta = self.cluster.between
        return Choice(self.name, self.cluster._replace(between=Link(alpha, beta * lanes)))

    def of(self, collective: str, size: int, lengths: Lengths, item: int) -> Algorithm:
        """Return the algorithm for a call of `size` ranks; `item` are the bytes of an element.

        Where `come` is given each rank has lengths of its own: then the choice depends on the collective only.
        """
        if lengths.come:
            return pairwise.all_to_all
        equal_blocks = len({*lengths.rows}) == 1
        named = ALGORITHMS[collective].get(self.name)
        if named and (equal_blocks or not named.equal_blocks):
            return named
        return select(collective, size, lengths.total, item, self.cluster, equal_blocks)


@lru_cache(maxsize=4096)
def select(
    collective: str, size: int, elements: float, item: int, cluster: Cluster = CLUSTER, equal_blocks: bool = True
) -> Algorithm:
    """Return the cheapest algorithm for `elements` of `item` bytes in the larger array, on `size` ranks.

    It looks at nothing but its arguments, so ranks that pass the same ones get the same. Without `equal_blocks` those
    algorithms are left out that need them.
    """
    found = ALGORITHMS[collective].values()
    fitting = [algorithm for algorithm in found if equal_blocks or not algorithm.equal_blocks]
    return min(fitting, key=lambda algorithm: closed_form(algorithm, size, elements, item, cluster))


def hierarchy(nodes: int, elements: float, item: int, cluster: Cluster) -> float:
    """Return the seconds of an all_reduce in three: reduce-scatter inside each node; all_reduce between the nodes, in
    which every rank of a node takes part with its share; all-gather inside.

    Inside a node the ranks read each other's memory: one step, in which each takes a share from every other one. One
    part starts when the one before has ended everywhere.
    """
    local = cluster.ranks
    share = elements / local
    across = cluster._replace(between=cluster.between._replace(beta=cluster.between.beta * local), ranks=1)
    rest = elements - share
    inside = [Rounds(1, rest, local, lanes=0, worked=rest), Rounds(1, rest, local, lanes=0)] if local > 1 else []
    best = select("all_reduce", nodes, share, item, across)
    return bound(inside, local, item, cluster) + closed_form(best, nodes, share, item, across)
