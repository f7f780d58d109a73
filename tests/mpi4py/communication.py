"""A program of mpi4py that prints what communicators, messages, requests and collectives return, as rank 0 gathers it.

It is written once and run on ringcomm and on an MPI, which must print the same.
"""

import pprint

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
SECTIONS = []


def section(fn):
    SECTIONS.append(fn)
    return fn


def refused(call):
    try:
        call()
    except MPI.Exception as error:
        return error.Get_error_class()
    except (TypeError, ValueError, BufferError) as error:
        return type(error).__name__
    return None


@section
def communicators():
    found = [comm.Get_name(), MPI.COMM_SELF.size, comm.Compare(comm), comm.Compare(MPI.COMM_SELF) if size > 1 else 0]
    duplicate = comm.Dup()
    found += [comm.Compare(duplicate), duplicate.rank, duplicate.name, duplicate == comm, MPI.Intracomm(comm) == comm]
    reversed_ = comm.Split(0, -rank)
    found += [reversed_.rank, comm.Compare(reversed_), reversed_.allgather(rank)]
    part = comm.Split(rank % 2 if rank else MPI.UNDEFINED, rank)
    found += [part == MPI.COMM_NULL, None if not part else (part.rank, part.size, part.group.Translate_ranks())]
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found += [shared.size, shared.rank]
    evens = comm.group.Incl(range(0, size, 2))
    for made in (comm.Create(evens), comm.Create_group(evens) if rank % 2 == 0 else MPI.COMM_NULL):
        found.append(None if made == MPI.COMM_NULL else made.allreduce(rank))
        if made:
            made.Free()
    for each in (duplicate, reversed_, part, shared):
        if each:
            each.Free()
        found.append(each == MPI.COMM_NULL)
    return found


@section
def attributes():
    deleted = []
    key = MPI.Comm.Create_keyval(lambda comm, key, value: value + 1, lambda comm, key, value: deleted.append(value))
    first = comm.Dup()
    first.Set_attr(key, 10)
    second = first.Dup()
    found = [second.Get_attr(key), comm.Get_attr(key), comm.Get_attr(MPI.TAG_UB) >= 2**31 - 1]
    second.Free()
    first.Set_attr(key, 20)
    first.Delete_attr(key)
    first.Free()
    return [*found, deleted, MPI.Comm.Free_keyval(key) == MPI.KEYVAL_INVALID]


@section
def cartesian():
    dims = MPI.Compute_dims(size, 2)
    grid = comm.Create_cart(dims, periods=[True, False])
    found = [
        dims,
        grid.Get_topo(),
        grid.Shift(0, 1),
        grid.Shift(1, 1),
        grid.Shift(1, -2),
        grid.neighbor_allgather(rank),
    ]
    found += [[grid.Get_coords(each) for each in range(size)], grid.Get_cart_rank([-1, 0]), grid.topology == MPI.CART]
    row = grid.Sub([False, True])
    found += [row.dims, row.rank, row.allgather(rank), MPI.Compute_dims(12, [0, 2, 0])]
    found.append(refused(lambda: comm.Create_cart([size + 1])) is not None)
    line = comm.Create_cart([max(size - 1, 1)])
    found.append(line != MPI.COMM_NULL)
    for each in (line, row, grid):
        if each != MPI.COMM_NULL:
            each.Free()
    return found


@section
def point_to_point():
    status = MPI.Status()
    received = np.zeros(4, "i")
    comm.Sendrecv(np.arange(3, dtype="i") + rank, right, 5, received, left, MPI.ANY_TAG, status)
    found = [received.tolist(), status.source, status.tag, status.Get_count(MPI.INT), status.Get_elements(MPI.INT)]
    comm.Sendrecv_replace(received, left, 1, right, 1)
    found.append(received.tolist())
    requests = [comm.Irecv(np.zeros(1), MPI.ANY_SOURCE, 7), comm.Isend(np.ones(1), right, 7)]
    found += [MPI.Request.Waitall(requests, [status]), status.source == left, requests == [MPI.REQUEST_NULL] * 2]
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    matrix = np.arange(6.0).reshape(3, 2)
    target = np.zeros(3)
    comm.Sendrecv([matrix, 1, column], right, 0, target, left, 0)
    found.append(target.tolist())
    column.Free()
    sending = comm.issend({"from": rank}, right, 3)
    message = comm.mprobe(MPI.ANY_SOURCE, 3, status)
    found += [status.source, message.recv(), sending.wait(), comm.iprobe(tag=3)]
    comm.Send(np.zeros(3), MPI.PROC_NULL)
    comm.Recv(np.zeros(3), MPI.PROC_NULL, status=status)
    found += [status.source == MPI.PROC_NULL, status.tag == MPI.ANY_TAG, status.count]
    sending = comm.Isend(np.zeros(2, "i"), right, 9)
    found += [refused(lambda: comm.Recv(np.zeros(1, "i"), left, 9)) == MPI.ERR_TRUNCATE, sending.Wait()]
    found += [refused(lambda: comm.Send(np.zeros(1), size + 3)) == MPI.ERR_RANK]
    found += [refused(lambda: comm.Send(np.zeros(1), right, -5)) == MPI.ERR_TAG]
    return [*found, refused(lambda: comm.Send(np.ones((3, 2))[:, 0], right))]


@section
def requests():
    data = np.zeros(1, "i")
    receive, send = comm.Recv_init(data, left, 2), comm.Send_init(np.array([rank], "i"), right, 2)
    found = []
    for _ in range(3):
        MPI.Prequest.Startall([receive, send])
        MPI.Request.Waitall([receive, send])
        found.append(int(data[0]))
    found += [receive == MPI.REQUEST_NULL, receive.Test()]
    receive.Free(), send.Free()
    receives = [comm.irecv(source=rank, tag=tag) for tag in range(4)]
    comm.send("two", rank, 2)
    found += [MPI.Request.waitany(receives), MPI.Request.testany(receives)[1]]
    comm.send("zero", rank, 0), comm.send("three", rank, 3)
    found += [receives[3].wait(), MPI.Request.waitsome(receives), MPI.Request.Testall(receives)]
    receives[1].Cancel()
    status = MPI.Status()
    found += [receives[1].Wait(status), status.Is_cancelled(), MPI.Request.Waitany(receives) == MPI.UNDEFINED]
    return found


@section
def moving():
    mine = np.arange(2, dtype="i") + 10 * rank
    table = np.zeros((size, 2), "i")
    comm.Allgather(mine, table)
    found = [table.tolist()]
    table[:] = 0
    table[rank] = mine
    comm.Allgather(MPI.IN_PLACE, table)
    found.append(table.tolist())
    for root in range(size):
        x = mine.copy()
        comm.Bcast(x, root)
        comm.Gather(mine, table if rank == root else None, root)
        part = np.zeros(2, "i")
        comm.Scatter(table if rank == root else None, part, root)
        found += [x.tolist(), part.tolist()]
        counts = [i + 1 for i in range(size)]
        longer, joined = np.full(rank + 1, rank, "i"), np.zeros(sum(counts) + 1, "i")
        comm.Gatherv(longer, [joined, (counts, [i * (i + 1) // 2 + 1 for i in range(size)])], root)
        found.append(joined.tolist())
        longer[:] = -1
        comm.Scatterv([joined, (counts, [i * (i + 1) // 2 for i in range(size)])], longer, root)
        found.append(longer.tolist())
    counts = [i + 1 for i in range(size)]
    joined = np.zeros(sum(counts), "d")
    comm.Allgatherv(np.full(rank + 1, rank, "d"), [joined, counts])
    found.append(joined.tolist())
    exchanged = np.zeros(size, "i")
    comm.Alltoall(np.arange(size, dtype="i") + 10 * rank, exchanged)
    found.append(exchanged.tolist())
    comm.Alltoall(MPI.IN_PLACE, exchanged)
    found.append(exchanged.tolist())
    ragged = np.zeros((rank + 1) * size, "i")
    comm.Alltoallv([np.repeat(np.arange(size, dtype="i"), counts), counts], [ragged, [rank + 1] * size])
    found.append(ragged.tolist())
    types = [MPI.INT] * size
    comm.Alltoallw(
        [np.arange(size, dtype="i") + rank, [1] * size, [4 * i for i in range(size)], types],
        [exchanged, [1] * size, [4 * (size - 1 - i) for i in range(size)], types],
    )
    return [*found, exchanged.tolist()]


def first(inbuf, inout, _):
    """a op b = a where a is odd, else b: associative, and not commutative."""
    a, b = np.frombuffer(inbuf, "i"), np.frombuffer(inout, "i")
    b[:] = np.where(a % 2, a, b)


@section
def reductions():
    x = np.array([rank + 1, 3 - rank, 7], "i")
    y = np.zeros(3, "i")
    found = []
    own = MPI.Op.Create(first, commute=False)
    for op in (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR, own):
        for call in (comm.Allreduce, comm.Reduce, comm.Scan, comm.Exscan):
            y[:] = 0
            call(x, y, op)
            found.append(y.tolist() if rank or call != comm.Exscan else None)
            y[:] = x
            call(MPI.IN_PLACE if rank == 0 or call != comm.Reduce else y, y, op)
            found.append(y.tolist())
    pairs = np.array([(rank % 2, rank), (5, size - rank)], [("value", "i"), ("index", "i")])
    for op in (MPI.MINLOC, MPI.MAXLOC):
        best = np.zeros_like(pairs)
        comm.Allreduce([pairs, MPI.TWOINT], [best, MPI.TWOINT], op)
        found.append(best.tolist())
    wide = np.arange(2 * size, dtype="d") + rank
    share, counts = np.zeros(2), list(range(size))
    comm.Reduce_scatter_block(wide, share)
    found.append(share.tolist())
    ragged = np.zeros(rank)
    comm.Reduce_scatter(wide[: sum(counts)].copy(), ragged, counts, MPI.MAX)
    found.append(ragged.tolist())
    comm.Reduce_scatter_block(MPI.IN_PLACE, [wide, 2, MPI.DOUBLE])
    own.Free()
    return [*found, wide[:2].tolist()]


@section
def objects():
    found = []
    for length in (1, 400, 600, 100_000):
        mine = {"rank": rank, "text": str(rank) * length * (rank + 1)}

        def short(each):
            return each and (each["rank"], len(each["text"]), each["text"][:1])

        for root in (0, size - 1):
            found.append(short(comm.bcast(mine if rank == root else None, root)))
            gathered = comm.gather(mine, root)
            found.append(gathered and [short(each) for each in gathered])
            found.append(short(comm.scatter([mine] * size if rank == root else None, root)))
        found.append([short(each) for each in comm.allgather(mine)])
        found.append([short(each) for each in comm.alltoall([mine] * size)])
    found += [comm.allreduce(rank), comm.reduce([rank]), comm.scan([rank]), comm.exscan([rank])]
    found += [comm.allreduce((rank % 2, rank), MPI.MAXLOC), comm.allreduce(str(rank), op=lambda x, y: x + y)]
    return [*found, refused(lambda: comm.alltoall([1] * (size + 1)))]


@section
def nonblocking():
    x, y, z = np.array([rank, 1.0]), np.zeros(2), np.zeros(2 * size)
    started = [comm.Iallreduce(x, y), comm.Iallgather(x, z), comm.Ibarrier(), comm.Iscan(x, x.copy())]
    MPI.Request.Waitall(started)
    found = [y.tolist(), z.tolist()]
    sum_ = comm.Allreduce_init(x, y)
    for step in range(3):
        x[0] = step
        sum_.Start()
        sum_.Wait()
        found.append(y.tolist())
    sum_.Free()
    counts = [i + 1 for i in range(size)]
    joined = np.zeros(sum(counts))
    gathering = comm.Igatherv(np.full(rank + 1, rank, "d"), [joined, counts] if rank == 0 else None)
    if rank == 0:  # a nonblocking call waits for nobody
        for other in range(1, size):
            comm.send("go", other)
    else:
        comm.recv()
    gathering.Wait()
    return [*found, joined.tolist()]


for each in SECTIONS:
    results = comm.gather(each())
    if rank == 0:
        print(each.__name__)
        pprint.pprint(results, width=110)
