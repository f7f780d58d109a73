"""Communicators with a topology."""

from typing import Any, ClassVar

from ringcomm.mpi4py.calls.neighbors import Neighbors
from ringcomm.mpi4py.comm.intracomm import Intracomm
from ringcomm.mpi4py.groups.topology import Cart, DistGraph, Graph

__all__ = ["Topocomm"]


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
