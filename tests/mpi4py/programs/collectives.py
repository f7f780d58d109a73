"""Collectives that move arrays: blocking, nonblocking and persistent, in place, of counts that differ."""

import numpy as np
from mpi4py import MPI
from sections import agreed, comm, finished, rank, refused, report, section, size

COUNTS = [each + 1 for each in range(size)]  # of ranks that have different counts
STARTS = [each * (each + 1) // 2 for each in range(size)]
TOTAL = sum(COUNTS)
LAST = size - 1


def mine():
    return np.arange(2, dtype="i") + 10 * rank


def only(root, array):
    return array if rank == root else None


@section
def barriers():
    for call in (comm.Barrier, comm.Ibarrier, comm.Barrier_init, comm.barrier):
        finished(call())
    yield "passed", comm.allgather(rank)


@section
def rooted():
    for root in sorted({0, LAST}):
        results = []
        for call in (comm.Bcast, comm.Ibcast, comm.Bcast_init):
            x = mine()
            finished(call(x, root))
            results.append(x.tolist())
        yield f"Bcast from {root}", agreed(results)
        results = []
        for call in (comm.Gather, comm.Igather, comm.Gather_init):
            table = np.zeros((size, 2), "i")
            finished(call(mine(), only(root, table), root))
            results.append(table.tolist())
        yield f"Gather to {root}", agreed(results)
        results = []
        for call in (comm.Scatter, comm.Iscatter, comm.Scatter_init):
            x = np.zeros(2, "i")
            finished(call(only(root, np.arange(2 * size, dtype="i")), x, root))
            results.append(x.tolist())
        yield f"Scatter from {root}", agreed(results)


@section
def rooted_of_different_counts():
    for root in sorted({0, LAST}):
        results = []
        for call in (comm.Gatherv, comm.Igatherv, comm.Gatherv_init):
            joined = np.full(TOTAL + 1, -1, "d")
            finished(call(np.full(rank + 1, rank, "d"), [joined, (COUNTS, [each + 1 for each in STARTS])], root))
            results.append(joined.tolist())
        yield f"Gatherv to {root}", agreed(results)
        results = []
        for call in (comm.Scatterv, comm.Iscatterv, comm.Scatterv_init):
            x = np.zeros(rank + 1)
            finished(call([np.arange(TOTAL, dtype="d"), COUNTS, STARTS, MPI.DOUBLE], x, root))
            results.append(x.tolist())
        yield f"Scatterv from {root}", agreed(results)


@section
def to_all():
    results = []
    for call in (comm.Allgather, comm.Iallgather, comm.Allgather_init):
        table = np.zeros((size, 2), "i")
        finished(call(mine(), table))
        results.append(table.tolist())
    yield "Allgather", agreed(results)
    results = []
    for call in (comm.Allgatherv, comm.Iallgatherv, comm.Allgatherv_init):
        joined = np.zeros(TOTAL, "i")
        finished(call(np.full(rank + 1, rank, "i"), [joined, COUNTS]))
        results.append(joined.tolist())
    yield "Allgatherv", agreed(results)


@section
def exchanges():
    results = []
    for call in (comm.Alltoall, comm.Ialltoall, comm.Alltoall_init):
        x = np.zeros(size, "i")
        finished(call(np.arange(size, dtype="i") + 10 * rank, x))
        results.append(x.tolist())
    yield "Alltoall", agreed(results)
    results = []
    for call in (comm.Alltoallv, comm.Ialltoallv, comm.Alltoallv_init):
        x = np.zeros((rank + 1) * size, "i")
        finished(call([np.repeat(np.arange(size, dtype="i"), COUNTS) + 10 * rank, COUNTS], [x, [rank + 1] * size]))
        results.append(x.tolist())
    yield "Alltoallv", agreed(results)
    results, ones = [], [1] * size
    for call in (comm.Alltoallw, comm.Ialltoallw, comm.Alltoallw_init):
        x = np.zeros(size, "i")
        sent = [np.arange(size, dtype="i") + 10 * rank, ones, [4 * i for i in range(size)], [MPI.INT] * size]
        finished(call(sent, [x, ones, [4 * (LAST - i) for i in range(size)], [MPI.INT] * size]))
        results.append(x.tolist())
    yield "Alltoallw, reversed", agreed(results)


@section
def in_place():
    table = np.zeros((size, 2), "i")
    table[rank] = mine()
    for call in (comm.Allgather, comm.Iallgather, comm.Allgather_init):
        x = table.copy()
        finished(call(MPI.IN_PLACE, x))
        yield call.__name__, x.tolist()
    joined = np.zeros(TOTAL, "i")
    joined[STARTS[rank] : STARTS[rank] + rank + 1] = rank
    comm.Allgatherv(MPI.IN_PLACE, [joined, COUNTS])
    yield "Allgatherv", joined.tolist()
    x = table.copy()
    comm.Gather(MPI.IN_PLACE if rank == 0 else mine(), only(0, x))
    yield "Gather", x.tolist()
    x = np.arange(2 * size, dtype="i") if rank == 0 else np.zeros(2, "i")
    comm.Scatter(only(0, x), MPI.IN_PLACE if rank == 0 else x)
    yield "Scatter", x.tolist()
    joined[: rank + 1] = rank
    comm.Gatherv(MPI.IN_PLACE if rank == 0 else joined[: rank + 1].copy(), [joined, COUNTS])
    yield "Gatherv", joined.tolist()
    x = np.arange(TOTAL, dtype="i") if rank == 0 else np.zeros(rank + 1, "i")
    comm.Scatterv([x, COUNTS] if rank == 0 else None, MPI.IN_PLACE if rank == 0 else x)
    yield "Scatterv", x.tolist()
    x = np.arange(size, dtype="i") + 10 * rank
    comm.Alltoall(MPI.IN_PLACE, x)
    yield "Alltoall", x.tolist()


@section
def started_again():
    x, y = np.zeros(1), np.zeros(size)
    gather = comm.Allgather_init(x, y)
    for step in range(3):
        x[0] = 10 * rank + step
        gather.Start()
        gather.Wait()
        yield f"start {step}", y.tolist()
    gather.Free()


@section
def at_once():
    counts = np.zeros(TOTAL)
    gathering = comm.Igatherv(np.full(rank + 1, rank, "d"), [counts, COUNTS] if rank == 0 else None)
    if rank == 0:  # a nonblocking call waits for nobody
        for other in range(1, size):
            comm.send("go", other)
    else:
        comm.recv()
    gathering.Wait()
    yield "Igatherv", counts.tolist()
    first, second = np.array([rank]), np.array([-rank])
    MPI.Request.Waitall([comm.Ibcast(first, LAST), comm.Ibcast(second, LAST), comm.Ibarrier()])
    yield "two", (first.tolist(), second.tolist())


@section
def refusals():
    for call in (comm.Bcast, comm.Ibcast, comm.Bcast_init):
        yield f"no such root of {call.__name__}", refused(call, np.zeros(1), size)
    yield "counts", refused(comm.Allgatherv, np.zeros(1), [np.zeros(size), [1] * (size + 1)])
    yield "no buffer", refused(comm.Bcast, "text")
    yield "no output", refused(comm.Alltoall, np.zeros(size), None)
    yield "uneven", size == 1 or refused(comm.Alltoall, np.zeros(size + 1), np.zeros(size + 1))
    yield "not contiguous", refused(comm.Bcast, np.zeros((3, 2))[:, 0])
    yield "usable", comm.allgather(rank)


report()
