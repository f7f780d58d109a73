"""The heat equation on a square plate, by an explicit scheme: a Cartesian grid of ranks that exchange halos.

    ringcomm run --mpi4py -n 4 examples/mpi4py_heat.py
    mpirun -n 4 python examples/mpi4py_heat.py

Every rank holds a block of the plate, with a border of one cell for the values of its neighbors. The upper edge is hot,
the others are cold. The result is the same on any number of ranks, to the last bit.
"""

import argparse

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

DIFFUSION = 0.2  # diffusivity × time step / cell²; the scheme is stable up to 0.25

Plate = npt.NDArray[np.float64]


def share(cells: int, parts: int, index: int) -> slice:
    """Return the cells of a part."""
    return slice(index * cells // parts, (index + 1) * cells // parts)


class Halo:
    """The edges of a block that the neighbors need, and the borders that they fill; one pair for each side."""

    def __init__(self, grid: MPI.Cartcomm, plate: Plate) -> None:
        self.grid, self.plate = grid, plate
        self.sides = []
        for axis in range(2):
            last = plate.shape[axis] - 1
            for direction, edge, border in ((-1, 1, last), (1, last - 1, 0)):
                source, dest = grid.Shift(axis, direction)
                self.sides.append((dest, self.line(axis, edge), source, self.line(axis, border)))

    def line(self, axis: int, index: int) -> MPI.Datatype:
        """Return the type of a row (axis 0) or column of the plate, without its ends."""
        counts, first = [count - 2 for count in self.plate.shape], [1, 1]
        counts[axis], first[axis] = 1, index
        return MPI.DOUBLE.Create_subarray(self.plate.shape, counts, first).Commit()

    def exchange(self) -> None:
        """Fill the borders; beyond the edges of the plate there is no neighbor, and they keep their values."""
        for dest, edge, source, border in self.sides:
            self.grid.Sendrecv([self.plate, 1, edge], dest, recvbuf=[self.plate, 1, border], source=source)


def step(plate: Plate) -> float:
    """Advance a block by a time step; return the largest change."""
    inner = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    change = DIFFUSION * (around - 4 * inner)
    inner += change
    return float(abs(change).max())


def main(cells: int, steps: int) -> None:
    world = MPI.COMM_WORLD
    grid = world.Create_cart(MPI.Compute_dims(world.size, 2))
    rows, columns = (share(cells, *each) for each in zip(grid.dims, grid.coords, strict=True))
    plate = np.zeros((rows.stop - rows.start + 2, columns.stop - columns.start + 2))
    if rows.start == 0:
        plate[0] = 1.0
    halo = Halo(grid, plate)
    largest = np.empty(1)
    for number in range(1, steps + 1):
        halo.exchange()
        largest[0] = step(plate)
        if number % (steps // 4) == 0:
            grid.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
            if grid.rank == 0:
                print(f"step {number}: largest change {largest[0]:.12f}")
    blocks = grid.gather((rows, columns, plate[1:-1, 1:-1]))
    if blocks is not None:
        whole = np.empty((cells, cells))
        for place_rows, place_columns, block in blocks:
            whole[place_rows, place_columns] = block
        print(f"mean {whole.mean():.12f}, center {whole[cells // 2, cells // 2]:.12f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60, help="along each side of the plate")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.cells, arguments.steps)
