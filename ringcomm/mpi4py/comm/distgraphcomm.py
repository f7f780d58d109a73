"""Communicators whose ranks form a graph, of which each knows its own edges."""

from ringcomm.mpi4py.comm.topocomm import Topocomm
from ringcomm.mpi4py.groups.context import KINDS
from ringcomm.mpi4py.groups.topology import DistGraph

__all__ = ["Distgraphcomm"]


class Distgraphcomm(Topocomm):
    """A communicator whose ranks form a graph, of which each rank knows its edges."""

    _topologies = (DistGraph,)
    _topology: DistGraph

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of inedges and outedges, and whether they have weights."""
        return self.indegree, self.outdegree, self._topology.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """Return the inedges, the outedges, and their weights."""
        return self.inedges, self.outedges, self._topology.weights


KINDS[DistGraph] = Distgraphcomm
