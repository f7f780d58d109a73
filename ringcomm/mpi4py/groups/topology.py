"""Virtual topologies: which ranks are neighbors, in a Cartesian grid or a graph. No communication."""

import operator
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ringcomm.mpi4py.base.constants import PROC_NULL, UNWEIGHTED, WEIGHTS_EMPTY
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_DIMS, ERR_RANK, failure
from ringcomm.mpi4py.base.integers import integer, integral

__all__ = ["Cart", "Compute_dims", "DistGraph", "Graph", "Topology", "weights_of"]


class Cart(NamedTuple):
    """A grid, numbered in row-major order."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @property
    def nodes(self) -> int:
        return prod(self.dims)

    def coords(self, rank: int) -> list[int]:
        _check_rank(rank, self.nodes)
        coords = []
        for length in reversed(self.dims):
            rank, coord = divmod(rank, length)
            coords.append(coord)
        return coords[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        if len(coords) != len(self.dims):
            raise ValueError(f"coords: expected {len(self.dims)}, got {len(coords)}")
        rank = 0
        for coord, length, periodic in zip(map(operator.index, coords), self.dims, self.periods, strict=True):
            if not periodic and not 0 <= coord < length:
                raise failure(
                    ERR_ARG, f"coords: expected 0 to {length - 1}, where the grid is not periodic; got {coord}"
                )
            rank = rank * length + coord % length
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks `disp` steps before and after `rank` in a direction."""
        if not 0 <= direction < len(self.dims):
            raise failure(ERR_ARG, f"direction: expected 0 to {len(self.dims) - 1}, got {direction}")

        def at(distance: int) -> int:
            coords = self.coords(rank)
            coords[direction] += distance
            inside = self.periods[direction] or 0 <= coords[direction] < self.dims[direction]
            return self.rank(coords) if inside else PROC_NULL

        return at(-disp), at(disp)

    def edges_of(self, rank: int) -> tuple[list[int], list[int]]:
        neighbors = [each for direction in range(len(self.dims)) for each in self.shift(rank, direction, 1)]
        return neighbors, list(neighbors)


class Graph(NamedTuple):
    """A graph. `ends[i]` is the number of neighbors of the nodes up to i, and `edges` has all neighbors in order."""

    ends: tuple[int, ...]
    edges: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.ends)

    def neighbors(self, rank: int) -> list[int]:
        _check_rank(rank, self.nodes)
        return list(self.edges[self.ends[rank - 1] if rank else 0 : self.ends[rank]])

    def edges_of(self, rank: int) -> tuple[list[int], list[int]]:
        return self.neighbors(rank), self.neighbors(rank)


class DistGraph(NamedTuple):
    """The edges of one rank in a graph, with their weights; None without weights."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[list[int], list[int]] | None

    def edges_of(self, rank: int) -> tuple[list[int], list[int]]:  # noqa: ARG002 (each rank knows its own only)
        return list(self.sources), list(self.destinations)


# `edges_of(rank)`: the ranks from which, and to which, the neighborhood collectives of a rank communicate.
Topology = Cart | Graph | DistGraph


def weights_of(weights: Sequence[int] | int | None, count: int) -> list[int] | None:
    """Return the weights of `count` edges, None if they have none."""
    if weights is None or (isinstance(weights, int) and weights == UNWEIGHTED):
        return None
    found = [] if isinstance(weights, int) and weights == WEIGHTS_EMPTY else list(weights)  # type: ignore[arg-type]  # of an int only WEIGHTS_EMPTY
    if len(found) != count:
        raise ValueError(f"weights: expected {count}, got {len(found)}")
    return found


@integral
def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return the lengths of a grid of `nnodes` nodes, as equal as can be; those in `dims` that are not 0 are kept."""
    found = [0] * dims if isinstance(dims, int) else [*map(integer, dims)]
    fixed, free = prod(length for length in found if length), found.count(0)
    if any(length < 0 for length in found) or nnodes <= 0 or nnodes % fixed or (not free and nnodes != fixed):
        expected = "lengths >= 0 whose product is the number of nodes, or a divisor of it where some are 0 (free)"
        raise failure(ERR_DIMS, f"dims: expected {expected}, got {found} for {nnodes} nodes")
    lengths = [1] * free
    for factor in _prime_factors(nnodes // fixed):
        lengths.sort()
        lengths[0] *= factor
    lengths.sort()
    return [length or lengths.pop() for length in found]


def _check_rank(rank: int, nodes: int) -> None:
    if not 0 <= rank < nodes:
        raise failure(ERR_RANK, f"rank: expected 0 to {nodes - 1}, got {rank}")


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors, largest first."""
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return sorted([*factors, number] if number > 1 else factors, reverse=True)
