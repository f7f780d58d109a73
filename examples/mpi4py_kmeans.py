"""k-means: every rank holds a part of the points, and the ranks agree on the centers by Allreduce.

    ringcomm run --mpi4py -n 4 examples/mpi4py_kmeans.py
    mpirun -n 4 python examples/mpi4py_kmeans.py

The coordinates are integers, so that sums are exact and the result is the same on any number of ranks.
"""

import argparse

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Points = npt.NDArray[np.int64]  # [point, coordinate]


def make_points(count: int, clusters: int) -> Points:
    """Return points around as many centers, in random order."""
    random = np.random.default_rng(1)
    centers = random.integers(-10_000, 10_000, (clusters, 2))
    noise = random.integers(-1_000, 1_000, (count, 2))
    return centers[random.integers(0, clusters, count)] + noise


def scatter(comm: MPI.Intracomm, points: Points | None, count: int) -> Points:
    """Return this rank's part of the points of rank 0; parts differ by at most one point."""
    ends = [(rank + 1) * count // comm.size for rank in range(comm.size)]
    counts = [2 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    part = np.empty((counts[comm.rank] // 2, 2), np.int64)
    comm.Scatterv([points, counts] if comm.rank == 0 else None, part)
    return part


def farthest_first(comm: MPI.Intracomm, part: Points, clusters: int) -> Points:
    """Return centers to start from: each is the point that is farthest from those before it."""
    centers: Points = comm.bcast(part[:1].copy() if comm.rank == 0 else None)
    while len(centers) < clusters:
        away = distances(part, centers).min(axis=1)
        # Of several points at this distance all ranks take the same one: that with the lowest coordinates.
        mine = min((-int(square), *map(int, point)) for square, point in zip(away, part, strict=True))
        _, *farthest = comm.allreduce(mine, op=MPI.MIN)
        centers = np.vstack([centers, farthest])
    return centers


def distances(part: Points, centers: Points) -> Points:
    """Return the squared distance of each point to each center."""
    away: Points = ((part[:, None] - centers) ** 2).sum(axis=2)
    return away


def improve(comm: MPI.Intracomm, part: Points, centers: Points) -> tuple[Points, Points, int]:
    """Return the means of the points nearest to each center, how many these are, and their squared distances."""
    away = distances(part, centers)
    nearest = away.argmin(axis=1)
    sums = np.zeros((len(centers), 4), np.int64)  # of x, y, points, squared distances
    np.add.at(sums, nearest, np.column_stack([part, np.ones_like(nearest), away.min(axis=1)]))
    comm.Allreduce(MPI.IN_PLACE, sums, op=MPI.SUM)
    counts = sums[:, 2]
    return sums[:, :2] // np.maximum(counts, 1)[:, None], counts, int(sums[:, 3].sum())


def main(count: int, clusters: int) -> None:
    comm = MPI.COMM_WORLD
    part = scatter(comm, make_points(count, clusters) if comm.rank == 0 else None, count)
    centers = farthest_first(comm, part, clusters)
    for turn in range(1, 100):
        moved, counts, spread = improve(comm, part, centers)
        if comm.rank == 0:
            print(f"turn {turn}: sum of squared distances {spread}")
        if (moved == centers).all():
            break
        centers = moved
    if comm.rank == 0:
        for (x, y), members in zip(centers, counts, strict=True):
            print(f"center {x:6d} {y:6d}: {members} points")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--clusters", type=int, default=6)
    arguments = parser.parse_args()
    main(arguments.points, arguments.clusters)
