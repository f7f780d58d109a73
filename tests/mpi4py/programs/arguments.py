"""Arguments of other types: what converts to an integer, and elements that lie beside the array that is given."""

from decimal import Decimal

import numpy as np
from mpi4py import MPI
from sections import comm, refused, report, section

alone = MPI.COMM_SELF


class Integer:
    """Has an integer, and no index."""

    def __init__(self, value):
        self._value = value

    def __int__(self):
        return self._value


class Index:
    """Has an index, as the numbers of a list need it."""

    def __init__(self, value):
        self._value = value

    def __index__(self):
        return self._value


KINDS = {
    "__int__": Integer,
    "float": lambda value: value + 0.5,
    "NumPy float": np.float64,
    "NumPy integer": np.int16,
    "array": np.array,
    "Decimal": Decimal,
}


def messages(k):
    x, y = np.arange(3.0), np.zeros(3)
    for send, receive in (
        (lambda: alone.Isend(x, k(0), k(7)), lambda: alone.Recv(y, k(0), k(7))),
        (lambda: alone.Irecv(y, k(0), k(7)), lambda: alone.Send(x, k(0), k(7))),
        (lambda: alone.Irecv(y, k(0), k(7)), lambda: alone.Ssend(x, k(0), k(7))),
        (lambda: alone.isend(1, k(0), k(7)), lambda: alone.recv(None, k(0), k(7))),
        (lambda: alone.irecv(None, k(0), k(7)), lambda: alone.send(1, k(0), k(7))),
        (lambda: alone.isend(1, k(0), k(7)), lambda: alone.Probe(k(0), k(7)) and alone.recv()),
    ):
        request = send()
        receive()
        request.wait()
    alone.Sendrecv(x, k(0), k(7), y, k(0), k(7))
    alone.Sendrecv_replace(x, k(0), k(7), k(0), k(7))
    return y.tolist(), alone.sendrecv("object", k(0), k(7), None, k(0), k(7)), alone.iprobe(k(0), k(7))


def collectives(k):
    x, y = np.arange(3.0), np.zeros(3)
    alone.Bcast(x, k(0))
    alone.Ibcast(x, k(0)).Wait()
    alone.Reduce(x, y, MPI.SUM, k(0))
    alone.Gather(x, y, root=k(0))
    return y.tolist(), alone.bcast(1, k(0)), alone.gather(2, root=k(0)), alone.reduce(3, MPI.SUM, k(0))


def communicators(k):
    grid = alone.Create_cart([1])
    made = [alone.Split(k(0), k(0)), alone.Split_type(k(MPI.COMM_TYPE_SHARED), k(0)), grid]
    result = [each.size for each in made], grid.Get_coords(k(0)), grid.Shift(k(0), k(0))
    for each in made:
        each.Free()
    return result, comm.Get_attr(k(MPI.TAG_UB)) > 0


def datatypes(k):
    sizes = [
        MPI.INT.Create_contiguous(k(2)).extent,
        MPI.INT.Create_vector(k(2), k(1), k(3)).extent,
        MPI.INT.Create_hvector(k(2), k(1), k(12)).extent,
        MPI.INT.Create_resized(k(0), k(8)).extent,
        MPI.INT.Pack_size(k(2), alone),
        MPI.Datatype.Match_size(k(MPI.TYPECLASS_INTEGER), k(4)).size,
        len(MPI.Alloc_mem(k(5))),
        MPI.Aint_add(k(4), k(3)),
    ]
    status = MPI.Status()
    status.Set_source(k(3))
    status.Set_tag(k(4))
    status.Set_elements(MPI.INT, k(2))
    status.error = k(5)
    return sizes, status.source, status.tag, status.count, status.error


@section
def single_integers():
    for call in (messages, collectives, communicators, datatypes):
        for name, kind in KINDS.items():
            yield f"{call.__name__}, {name}", call(kind)
        yield f"{call.__name__}, string", refused(call, str)
    group = alone.Get_group()
    for name, kind in KINDS.items():
        yield f"range, {name}", group.Range_incl([(kind(0), kind(0), kind(1))]).size
        yield f"code, {name}", MPI.Exception(kind(1)).Get_error_code()


@section
def lists_of_integers():
    x, y = np.arange(4.0), np.zeros(4)
    i = Index
    grid = alone.Create_cart([i(1)], [True])
    yield "grid", (grid.dims, grid.Get_cart_rank([i(0)]), alone.Cart_map([i(1)]))
    graph = alone.Create_graph([i(1)], [i(0)])
    yield "graph", (graph.Get_topo(), alone.Graph_map([i(1)], [i(0)]))
    around = alone.Create_dist_graph_adjacent([i(0)], [i(0)])
    yield "distributed graph", around.Get_dist_neighbors()[:2]
    for each in (grid, graph, around):
        each.Free()
    group = alone.Get_group()
    yield "group", (group.Incl([i(0)]).size, group.Excl([i(0)]).size, list(group.Translate_ranks([i(0)], group)))
    yield "blocks", MPI.INT.Create_indexed([i(2)], [i(1)]).extent
    alone.Alltoallv([x, ([i(2)], [i(1)]), MPI.DOUBLE], [y, ([i(2)], [i(0)]), MPI.DOUBLE])
    yield "counts", y.tolist()
    for name in ("__int__", "float"):
        yield f"group, {name}", refused(group.Incl, [KINDS[name](0)])


@section
def elements_beside_the_array():
    matrix, copied = np.arange(20.0).reshape(5, 4), np.zeros((5, 4))
    column = MPI.DOUBLE.Create_vector(5, 1, 4).Commit()
    upwards = MPI.DOUBLE.Create_vector(5, 1, -4).Commit()
    narrow = column.Create_resized(0, 8).Commit()
    views = memoryview(matrix).cast("B"), memoryview(copied).cast("B")
    for name, call in {
        "message": lambda: alone.Sendrecv([matrix[0, 3:], 1, column], 0, 0, [copied[0, 3:], 1, column], 0, 0),
        "upwards": lambda: alone.Sendrecv([matrix[4, :1], 1, upwards], 0, 0, [copied[4, :1], 1, upwards], 0, 0),
        "two columns": lambda: alone.Sendrecv([matrix[0, 2:], 2, narrow], 0, 0, [copied[0, 2:], 2, narrow], 0, 0),
        "memoryview": lambda: alone.Sendrecv([views[0][8:16], 1, column], 0, 0, [views[1][8:16], 1, column], 0, 0),
        "Allgather": lambda: alone.Allgather([matrix[0, 3:], 1, column], [copied[0, 3:], 1, column]),
        "Gatherv": lambda: alone.Gatherv([matrix[0, 3:], 1, column], [copied[0, 3:], [1], [0], column]),
        "Alltoallw": lambda: alone.Alltoallw([matrix[0, 3:], [1], [0], [column]], [copied[0, :1], [1], [0], [column]]),
    }.items():
        copied[:] = 0
        call()
        yield name, copied.T.tolist()


report()
