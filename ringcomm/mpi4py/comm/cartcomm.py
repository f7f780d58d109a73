"""Communicators whose ranks form a grid."""

from collections.abc import Sequence
from typing import Any

from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.comm.topocomm import Topocomm
from ringcomm.mpi4py.groups.context import KINDS
from ringcomm.mpi4py.groups.topology import Cart

__all__ = ["Cartcomm"]


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


KINDS[Cart] = Cartcomm
