"""Topologies: grids and graphs of ranks, and collectives among neighbors."""

from functools import partial

import numpy as np
from mpi4py import MPI
from sections import agreed, comm, finished, named, rank, refused, report, section, size

LEFT, RIGHT = (rank - 1) % size, (rank + 1) % size


def ranks_of(ranks):
    return [named(each, "PROC_NULL") for each in ranks]


@section
def dimensions():
    for nodes, dims in ((size, 2), (12, 3), (12, [0, 2, 0]), (7, 2), (64, 2), (1, 1)):
        yield f"Compute_dims({nodes}, {dims})", MPI.Compute_dims(nodes, dims)
    yield "refused", refused(MPI.Compute_dims, 5, [2, 0])


@section
def grids():
    grid = comm.Create_cart(MPI.Compute_dims(size, 2), periods=[True, False])
    yield "Get_dim", (grid.Get_dim(), grid.dim, grid.ndim, type(grid).__name__)
    yield "Get_topo", (grid.Get_topo(), grid.topo)
    yield "dims, periods, coords", (grid.dims, grid.periods, grid.coords)
    yield "topology", (named(grid.Get_topology(), "CART"), named(grid.topology, "CART"), grid.is_topo)
    yield "Get_coords", [grid.Get_coords(each) for each in range(size)]
    yield "Get_cart_rank", [grid.Get_cart_rank(grid.Get_coords(each)) for each in range(size)]
    yield "Get_cart_rank, outside", (grid.Get_cart_rank([-1, 0]), refused(grid.Get_cart_rank, [0, -1]))
    for direction, steps in ((0, 1), (1, 1), (1, -2), (0, 5)):
        yield f"Shift({direction}, {steps})", ranks_of(grid.Shift(direction, steps))
    yield "edges", (ranks_of(grid.inedges), ranks_of(grid.outedges), grid.indegree, grid.outdegree)
    yield "degrees", (grid.degrees, tuple(map(ranks_of, grid.inoutedges)))
    row = grid.Sub([False, True])
    yield "Sub", (row.dims, row.periods, row.rank, row.allgather(rank))
    duplicate = grid.Dup()
    yield "Dup", (type(duplicate).__name__, duplicate.Get_topo())
    for each in (duplicate, row, grid):
        each.Free()
    yield "too many", refused(comm.Create_cart, [size + 1])
    shorter = comm.Create_cart([max(size - 1, 1)])
    yield "fewer", shorter.Get_topo() if shorter else None
    line = comm.Create_cart([size], [False], reorder=True)
    yield "Cart_map", named(line.Cart_map([size], [False]), "UNDEFINED")
    for each in (shorter, line):
        if each:
            each.Free()


@section
def graphs():
    index, edges = (
        np.cumsum([2] * size).tolist(),
        [n for each in range(size) for n in ((each - 1) % size, (each + 1) % size)],
    )
    graph = comm.Create_graph(index, edges)
    yield "Get_dims", (graph.Get_dims(), graph.dims, graph.nnodes, graph.nedges, type(graph).__name__)
    yield "Get_topo", (graph.Get_topo(), graph.topo == graph.Get_topo())
    yield "index, edges", (graph.index, graph.edges)
    yield "Get_neighbors", [(graph.Get_neighbors_count(each), graph.Get_neighbors(each)) for each in range(size)]
    yield "neighbors", (graph.neighbors, graph.nneighbors, graph.inedges, graph.outedges)
    yield "topology", named(graph.topology, "GRAPH")
    yield "Graph_map", named(comm.Graph_map(index, edges), "UNDEFINED")
    yield "neighbor_allgather", graph.neighbor_allgather(rank)
    graph.Free()


@section
def distributed_graphs():
    adjacent = comm.Create_dist_graph_adjacent([LEFT], [RIGHT], [rank + 1], [rank + 2])
    yield "adjacent", (adjacent.Get_dist_neighbors_count(), adjacent.Get_dist_neighbors(), type(adjacent).__name__)
    yield "degrees", (adjacent.indegree, adjacent.outdegree, adjacent.inedges, adjacent.outedges)
    yield "topology", named(adjacent.topology, "DIST_GRAPH")
    yield "neighbor_allgather", adjacent.neighbor_allgather(rank)
    yield "neighbor_alltoall", adjacent.neighbor_alltoall([(rank, RIGHT)])
    plain = comm.Create_dist_graph_adjacent([LEFT], [RIGHT])
    yield "unweighted", (plain.Get_dist_neighbors_count(), plain.Get_dist_neighbors())
    sources, degrees, targets = ([0], [size], list(range(size))) if rank == 0 else ([], [], [])
    star = comm.Create_dist_graph(sources, degrees, targets, reorder=False)
    yield "star", (star.Get_dist_neighbors_count(), star.inedges, sorted(star.outedges))
    for each in (adjacent, plain, star):
        each.Free()


@section
def neighbors():
    # Of two edges to one rank, Open MPI's Ineighbor_alltoallv takes the wrong one: no ring of one or two ranks.
    ring = comm.Create_cart([size], [size > 2])
    mine, two = np.array([10 * rank], "i"), np.array([rank, -rank], "i")
    counts = [each + 1 if each >= 0 else 1 for each in ring.Shift(0, 1)]
    words = [MPI.INT, MPI.INT]
    ragged = np.arange(counts[0] + counts[1], dtype="i") + 100 * rank
    for name, calls, sent, received in (
        ("allgather", (ring.Neighbor_allgather, ring.Ineighbor_allgather, ring.Neighbor_allgather_init), mine, 2),
        (
            "allgatherv",
            (ring.Neighbor_allgatherv, ring.Ineighbor_allgatherv, ring.Neighbor_allgatherv_init),
            np.full(rank + 1, rank, "i"),
            counts,
        ),
        ("alltoall", (ring.Neighbor_alltoall, ring.Ineighbor_alltoall, ring.Neighbor_alltoall_init), two, 2),
        (
            "alltoallv",
            (ring.Neighbor_alltoallv, ring.Ineighbor_alltoallv, ring.Neighbor_alltoallv_init),
            [ragged, counts],
            [rank + 1, rank + 1],
        ),
        (
            "alltoallw",
            (ring.Neighbor_alltoallw, ring.Ineighbor_alltoallw, ring.Neighbor_alltoallw_init),
            [two, [1, 1], [4, 0], words],
            (2, [[1, 1], [0, 4], words]),
        ),
    ):
        yield name, agreed([into(received, partial(call, sent)) for call in calls])
    yield "objects", (ring.neighbor_allgather(f"from {rank}"), ring.neighbor_alltoall([(rank, "back"), (rank, "on")]))
    ring.Free()


@section
def ends():
    line, ring = (comm.Create_cart([size], [periodic]) for periodic in (False, True))
    array = np.full(2, -1, "i")
    line.Neighbor_allgather(np.array([10 * rank], "i"), array)
    yield "the ends of a line", (array.tolist(), line.neighbor_allgather(rank))
    yield "a ring has none", ring.neighbor_alltoall([(rank, "back"), (rank, "on")])
    line.Free()
    ring.Free()


def into(received, call):
    """Call with a new buffer to receive in, and return what it holds when the call has finished."""
    match received:
        case int():
            array = np.zeros(received, "i")
            buf = array
        case list():
            array = np.zeros(sum(received), "i")
            buf = [array, received]
        case length, rest:
            array = np.zeros(length, "i")
            buf = [array, *rest]
    finished(call(buf))
    return array.tolist()


report()
