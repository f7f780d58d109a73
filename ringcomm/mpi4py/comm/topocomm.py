"""Communicators with a topology."""

from collections.abc import Sequence
from typing import Any, ClassVar

from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.calls.neighbors import Neighbors
from ringcomm.mpi4py.comm.intracomm import Intracomm
from ringcomm.mpi4py.groups.context import KINDS
from ringcomm.mpi4py.groups.topology import Cart, DistGraph, Graph

__all__ = ["Cartcomm", "Distgraphcomm", "Graphcomm", "Topocomm"]


class Topocomm(Neighbors, Intracomm):
    """A communicator with a topology."""

    _topologies: ClassVar[tuple[type, ...]] = (Cart, Graph, DistGraph)
    _topology = property(lambda self: self._object.topology)

    @classmethod
    def _check_kind(cls, named: Any) -> None:
        if not isinstance(named.topology, cls._topologies):
            raise TypeError(f"expected a communicator with a {' or '.join(each.__name__ for each in cls._topologies)}")

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The ranks from which, and to which, the neighborhood collectives communicate."""
        edges: tuple[list[int], list[int]] = self._topology.edges_of(self._object.rank)
        return edges

    @property
    def inedges(self) -> list[int]:
        """The ranks from which the neighborhood collectives communicate."""
        return self.inoutedges[0]

    @property
    def outedges(self) -> list[int]:
        """The ranks to which the neighborhood collectives communicate."""
        return self.inoutedges[1]

    @property
    def indegree(self) -> int:
        """The number of inedges."""
        return len(self.inedges)

    @property
    def outdegree(self) -> int:
        """The number of outedges."""
        return len(self.outedges)

    @property
    def degrees(self) -> tuple[int, int]:
        """The numbers of inedges and outedges."""
        return self.indegree, self.outdegree


class Cartcomm(Topocomm):
    """A communicator whose ranks form a grid."""

    _topologies = (Cart,)
    _topology: Cart

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._topology.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return the lengths, the periodicity and the coordinates of this rank."""
        return self.dims, self.periods, self.coords

    @handled
    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at some coordinates, which wrap around in periodic dimensions."""
        return self._topology.rank(coords)

    @handled
    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        return self._topology.coords(rank)

    @handled
    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks `disp` steps before and after this one; PROC_NULL beyond the grid."""
        return self._topology.shift(self._object.rank, direction, disp)

    @handled
    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Divide the grid into slices that have the remaining dimensions."""
        grid, coords = self._topology, self.coords
        kept = [i for i, remains in enumerate(remain_dims) if remains]
        dropped = [i for i in range(len(grid.dims)) if i not in kept]

        def part(axes: list[int]) -> Cart:
            return Cart(tuple(grid.dims[i] for i in axes), tuple(grid.periods[i] for i in axes))

        color, key = (part(axes).rank([coords[i] for i in axes]) for axes in (dropped, kept))
        return self._made(self._split(color, key, part(kept)))

    dim = ndim = property(Get_dim)
    topo = property(Get_topo)

    @property
    def dims(self) -> list[int]:
        """The lengths of the dimensions."""
        return list(self._topology.dims)

    @property
    def periods(self) -> list[int]:
        """Which dimensions are periodic."""
        return list(map(int, self._topology.periods))

    @property
    def coords(self) -> list[int]:
        """The coordinates of this rank."""
        return self.Get_coords(self._object.rank)


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


KINDS.update({Cart: Cartcomm, Graph: Graphcomm, DistGraph: Distgraphcomm})
