"""Communicators whose ranks form a graph that all of them know."""

from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.comm.topocomm import Topocomm
from ringcomm.mpi4py.groups.context import KINDS
from ringcomm.mpi4py.groups.topology import Graph

__all__ = ["Graphcomm"]


class Graphcomm(Topocomm):
    """A communicator whose ranks form a graph."""

    _topologies = (Graph,)
    _topology: Graph

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of nodes and edges."""
        return self._topology.nodes, len(self._topology.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the index and the edges of the graph."""
        return list(self._topology.ends), list(self._topology.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbors of a rank."""
        return len(self.Get_neighbors(rank))

    @handled
    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbors of a rank."""
        return self._topology.neighbors(rank)

    dims, topo = property(Get_dims), property(Get_topo)

    @property
    def nnodes(self) -> int:
        """The number of nodes."""
        return self.Get_dims()[0]

    @property
    def nedges(self) -> int:
        """The number of edges."""
        return self.Get_dims()[1]

    @property
    def index(self) -> list[int]:
        """For each node, the number of edges of the nodes up to it."""
        return self.Get_topo()[0]

    @property
    def edges(self) -> list[int]:
        """The neighbors of all nodes."""
        return self.Get_topo()[1]

    @property
    def neighbors(self) -> list[int]:
        """The neighbors of this rank."""
        return self.Get_neighbors(self._object.rank)

    @property
    def nneighbors(self) -> int:
        """The number of neighbors of this rank."""
        return len(self.neighbors)


KINDS[Graph] = Graphcomm
