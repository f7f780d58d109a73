"""Communicators of one group of ranks, and the communicators made from them."""

import operator
from collections.abc import Sequence
from typing import Any

from ringcomm.mpi4py.base import constants
from ringcomm.mpi4py.base.errhandler import Errhandler
from ringcomm.mpi4py.base.errors import ERR_COMM, ERR_DIMS, ERR_TOPOLOGY, FAILURES, failure, handled
from ringcomm.mpi4py.base.info import INFO_NULL, Info
from ringcomm.mpi4py.base.unsupported import UnsupportedMethod
from ringcomm.mpi4py.comm.comm import Comm
from ringcomm.mpi4py.groups import create_group as members
from ringcomm.mpi4py.groups.context import KINDS, OPEN, Context
from ringcomm.mpi4py.groups.group import Group
from ringcomm.mpi4py.groups.topology import Cart, DistGraph, Graph, weights_of

__all__ = ["Intracomm"]


class Intracomm(Comm):
    """A communicator of one group of ranks: all there are."""

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Make a communicator of the ranks of a group, which alone call it."""
        return self._connect(group, f"group {self._object.ranks}/{tag}", self._object)

    @classmethod
    def Create_from_group(
        cls,
        group: Group,
        stringtag: str = "org.mpi4py",
        info: Info = INFO_NULL,  # noqa: ARG003 (no hint is known)
        errhandler: Errhandler | None = None,
    ) -> Any:
        """Make a communicator of the ranks of a group, which alone call it."""
        comm = cls._connect(group, f"from group/{stringtag}", _any_context())
        if errhandler is not None:
            comm.Set_errhandler(errhandler)
        return comm

    @classmethod
    def _connect(cls, group: Group, tag: str, parent: Context) -> Any:
        try:
            if group.Get_rank() == constants.UNDEFINED:
                return Intracomm()
            comm = members.connect_members(group.ranks, group.Get_rank(), tag, parent)
        except FAILURES as error:
            parent.fail(error)
        return Intracomm._of(Context(comm, group.ranks, parent))

    # --- Topologies ---------------------------------------------------------------------------------------------------

    @handled
    def Create_cart(
        self,
        dims: Sequence[int],
        periods: Sequence[bool] | bool | None = None,
        reorder: bool = False,  # noqa: ARG002 (ranks keep their numbers)
    ) -> Any:
        """Arrange the ranks in a grid, in row-major order. Ranks beyond the grid get COMM_NULL."""
        return self._arranged(_cart(dims, periods))

    @handled
    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:  # noqa: ARG002 (ranks keep their numbers)
        """Arrange the ranks in a graph. Ranks beyond its nodes get COMM_NULL."""
        return self._arranged(_graph(index, edges))

    @handled
    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Sequence[int] | int | None = None,
        destweights: Sequence[int] | int | None = None,
        info: Info = INFO_NULL,  # noqa: ARG002 (no hint is known)
        reorder: bool = False,  # noqa: ARG002 (ranks keep their numbers)
    ) -> Any:
        """Arrange the ranks in a graph, of which each rank gives the edges that it has."""
        sources, destinations = (tuple(map(operator.index, ranks or ())) for ranks in (sources, destinations))
        weights = weights_of(sourceweights, len(sources)), weights_of(destweights, len(destinations))
        weighted = None if None in weights else weights
        return self._made(self._split(0, self._object.rank, DistGraph(sources, destinations, weighted)))  # type: ignore[arg-type]  # None in neither weights

    @handled
    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int] | int,
        destinations: Sequence[int],
        weights: Sequence[int] | int | None = None,
        info: Info = INFO_NULL,  # noqa: ARG002 (no hint is known)
        reorder: bool = False,  # noqa: ARG002 (ranks keep their numbers)
    ) -> Any:
        """Arrange the ranks in a graph, of which each rank gives some edges: `degrees[i]` of them from `sources[i]`."""
        counts = [degrees] * len(sources) if isinstance(degrees, int) else degrees
        starts = [source for source, count in zip(sources, counts, strict=True) for _ in range(count)]
        given = weights_of(weights, len(destinations))
        mine = list(zip(starts, destinations, given or [1] * len(starts), strict=True))
        gathered = self.allgather((mine, given is not None))
        edges = [edge for theirs, _ in gathered for edge in theirs]
        incoming = [(source, weight) for source, target, weight in edges if target == self._object.rank]
        outgoing = [(target, weight) for source, target, weight in edges if source == self._object.rank]
        (sources, into), (targets, out) = (
            zip(*each, strict=True) if each else ((), ()) for each in (incoming, outgoing)
        )
        weighted = (list(into), list(out)) if any(known for _, known in gathered) else None
        return self._made(self._split(0, self._object.rank, DistGraph(tuple(sources), tuple(targets), weighted)))

    @handled
    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None) -> int:
        """Return the rank that this one has in such a grid, UNDEFINED beyond it."""
        return self._mapped(_cart(dims, periods))

    @handled
    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """Return the rank that this one has in such a graph, UNDEFINED beyond it."""
        return self._mapped(_graph(index, edges))

    def _arranged(self, topology: Cart | Graph) -> Any:
        rank = self._object.rank
        return self._made(self._split(None if self._mapped(topology) < 0 else 0, rank, topology))

    def _mapped(self, topology: Cart | Graph) -> int:
        if topology.nodes > self._object.size:
            code = ERR_DIMS if isinstance(topology, Cart) else ERR_TOPOLOGY
            raise failure(code, f"expected at most {self._object.size} nodes, as many as ranks, got {topology.nodes}")
        rank = self._object.rank
        return rank if rank < topology.nodes else constants.UNDEFINED

    Create_intercomm = UnsupportedMethod("use Create or Split, and send by the ranks of both groups")
    Spawn = Spawn_multiple = UnsupportedMethod("start all ranks with ringcomm run, or use mpi4py.futures")
    Accept = Connect = UnsupportedMethod("start all ranks with one launcher")


def _any_context() -> Context:
    """Return the communicator of the world, whose timeout and error handler others without a parent have."""
    if not OPEN:
        raise failure(ERR_COMM, "MPI is not initialized, or was finalized")
    return max(OPEN, key=lambda context: (context.size, context.predefined))


def _cart(dims: Sequence[int], periods: Sequence[bool] | bool | None) -> Cart:
    lengths = [dims] if isinstance(dims, int) else [*map(operator.index, dims)]
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(lengths)
    if len(periods) != len(lengths):
        raise ValueError(f"periods: expected {len(lengths)}, got {len(periods)}")
    if any(length <= 0 for length in lengths):
        raise failure(ERR_DIMS, f"dims: expected lengths > 0, got {lengths}")
    return Cart(tuple(lengths), tuple(map(bool, periods)))


def _graph(index: Sequence[int], edges: Sequence[int]) -> Graph:
    ends = tuple(map(operator.index, index))
    ends = ends[1:] if len(ends) > 1 and not ends[0] else ends  # it may start with 0, as slices do
    return Graph(ends, tuple(map(operator.index, edges)))


KINDS[type(None)] = Intracomm
