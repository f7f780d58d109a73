"""Collectives on objects, which are pickled."""

import pickle

from mpi4py import MPI
from sections import comm, rank, refused, report, section, size

LAST = size - 1


def short(each):
    return each and (each["rank"], len(each["text"]), each["text"][:1])


@section
def moved():
    for length in (1, 400, 600, 100_000):  # in one message, and in several
        mine = {"rank": rank, "text": str(rank) * length * (rank + 1)}
        parts = [{"rank": each, "text": "x" * length} for each in range(size)]
        for root in sorted({0, LAST}):
            yield f"bcast from {root}", short(comm.bcast(mine if rank == root else None, root))
            gathered = comm.gather(mine, root)
            yield f"gather to {root}", gathered and [*map(short, gathered)]
            part = comm.scatter(parts if rank == root else None, root)
            yield f"scatter from {root}", part == parts[rank]
        yield "allgather", [*map(short, comm.allgather(mine))]
        yield "alltoall", [*map(short, comm.alltoall([mine] * size))]


@section
def reduced():
    yield "allreduce", (comm.allreduce(rank), comm.allreduce([rank]), comm.allreduce(rank, op=MPI.MAX))
    yield "reduce", (comm.reduce(rank), comm.reduce([rank], root=LAST), comm.reduce(rank, MPI.MIN, LAST))
    yield "scan", (comm.scan(rank), comm.scan([rank]), comm.scan(rank, MPI.PROD))
    yield "exscan", (comm.exscan(rank), comm.exscan([rank]), comm.exscan(rank, MPI.MAX))
    yield "MINLOC, MAXLOC", [comm.allreduce((rank % 2, rank), op) for op in (MPI.MINLOC, MPI.MAXLOC)]
    yield "sets", sorted(comm.allreduce({rank, rank + 1}, lambda x, y: x | y))
    yield "in rank order", comm.allreduce(str(rank), op=lambda x, y: x + y)
    yield "bits", [comm.allreduce(1 << rank, op) for op in (MPI.BAND, MPI.BOR, MPI.BXOR)]
    yield "truth", [comm.allreduce(rank > 0, op) for op in (MPI.LAND, MPI.LOR, MPI.LXOR)]
    yield "replaced", (comm.allreduce(rank, MPI.REPLACE), comm.allreduce(rank, MPI.NO_OP))


@section
def pickled():
    """The calls follow the settings of MPI.pickle."""
    MPI.pickle.__init__(lambda obj: b"own" + pickle.dumps(obj), lambda data: ("own", pickle.loads(data[3:])))
    received = comm.bcast(rank, LAST)
    yield "bcast", rank == LAST or received == ("own", LAST)
    yield "gather", comm.gather(rank) == ([("own", each) for each in range(size)] if rank == 0 else None)
    yield "alltoall", comm.alltoall([rank] * size) == [("own", each) for each in range(size)]
    yield "scatter", comm.scatter([*range(size)] if rank == 0 else None) == ("own", rank)
    yield "sendrecv", comm.sendrecv(rank, (rank + 1) % size, source=(rank - 1) % size)
    request = comm.isend(rank, (rank + 1) % size)
    yield "recv", comm.recv(source=(rank - 1) % size)
    request.wait()
    MPI.pickle.__init__()
    yield "again", comm.allgather(rank)
    try:
        MPI.pickle.dumps = pickle.dumps
    except AttributeError as error:
        yield "read-only", type(error).__name__


@section
def refusals():
    yield "alltoall", refused(comm.alltoall, [1] * (size + 1))
    yield "usable", comm.allgather(rank)


report()
