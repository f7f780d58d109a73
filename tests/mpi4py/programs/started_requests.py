"""Requests: waiting for one, all, any or some; persistent and generalized ones; what is canceled and freed."""

import numpy as np
from mpi4py import MPI
from sections import comm, described, left, named, rank, refused, report, right, section


def to_myself(*tags):
    """Return one receive per tag, from this rank."""
    return [comm.irecv(source=rank, tag=tag) for tag in tags]


def index(value):
    return named(value, "UNDEFINED")


@section
def one():
    status, x = MPI.Status(), np.zeros(1, "i")
    receive = comm.Irecv(x, rank, 1)
    yield "not complete", (receive.Test(), receive.Get_status(), bool(receive))
    comm.Send(np.array([5], "i"), rank, 1)
    while not receive.Get_status(status):
        pass
    yield "Get_status", (status.tag, bool(receive), x.tolist())
    yield "get_status", receive.get_status()
    yield "Test", (receive.Test(status), status.tag, receive == MPI.REQUEST_NULL)
    (receive,) = to_myself(2)
    yield "test", receive.test()
    comm.send("two", rank, 2)
    while not (outcome := receive.test(status))[0]:
        pass
    yield "test, complete", (outcome, status.tag, receive.wait())
    send = comm.Isend(x, right, 3)
    comm.Recv(x, left, 3)
    yield "Wait", (send.Wait(status), send.Wait(), send == MPI.REQUEST_NULL)
    null = MPI.REQUEST_NULL
    yield "null", (null.Wait(status), described(status), null.Test(), null.wait(), null.test(), null.Get_status())
    yield "refused", (refused(MPI.Request().Free), refused(MPI.Request().Cancel))


@section
def every():
    statuses, receives = [MPI.Status(), MPI.Status()], to_myself(0, 1)
    yield "none", (MPI.Request.Testall(receives), MPI.Request.testall(receives))
    for tag in (1, 0):
        comm.send(tag * 11, rank, tag)
    yield "waitall", (MPI.Request.waitall(receives, statuses), [each.tag for each in statuses], [*map(bool, receives)])
    x = np.zeros((2, 1), "i")
    requests = [comm.Irecv(x[0], left, 4), comm.Isend(np.array([rank], "i"), right, 4), MPI.REQUEST_NULL]
    statuses = []
    yield "Waitall", (MPI.Request.Waitall(requests, statuses), len(statuses), statuses[0].tag, x[0].tolist())
    yield "Testall", (MPI.Request.Testall(requests), MPI.Request.testall(requests), MPI.Request.Waitall([]))


@section
def any_one():
    status, receives = MPI.Status(), to_myself(0, 1, 2)
    yield "none", MPI.Request.testany(receives)[1:]
    comm.send("one", rank, 1)
    yield "waitany", (MPI.Request.waitany(receives, status), status.tag, [*map(bool, receives)])
    comm.send("two", rank, 2)
    while not (outcome := MPI.Request.testany(receives, status))[1]:
        pass
    yield "testany", (outcome, status.tag)
    comm.send("zero", rank, 0)
    yield "Waitany", (MPI.Request.Waitany(receives, status), status.tag)
    yield "none left", (index(MPI.Request.Waitany(receives)), index(MPI.Request.waitany(receives)[0]))
    yield "Testany", (index(MPI.Request.Testany(receives)[0]), MPI.Request.Testany(receives)[1])


@section
def some():
    statuses, receives = [MPI.Status() for _ in range(3)], to_myself(0, 1, 2)
    yield "none", (MPI.Request.Testsome(receives), MPI.Request.testsome(receives))
    comm.send("two", rank, 2)
    yield "waitsome", (MPI.Request.waitsome(receives, statuses), statuses[0].tag)
    comm.send("zero", rank, 0)
    while not (outcome := MPI.Request.testsome(receives, statuses))[0]:
        pass
    yield "testsome", (outcome, statuses[0].tag)
    comm.send("one", rank, 1)
    yield "Waitsome", MPI.Request.Waitsome(receives)
    yield "none left", [call(receives) for call in (MPI.Request.Waitsome, MPI.Request.waitsome, MPI.Request.Testsome)]


@section
def persistent():
    MPI.Attach_buffer(bytearray(4096 + MPI.BSEND_OVERHEAD))
    for prepare, label in (
        (comm.Send_init, "Send_init"),
        (comm.Ssend_init, "Ssend_init"),
        (comm.Bsend_init, "Bsend_init"),
        (comm.Rsend_init, "Rsend_init"),
    ):
        x, y, found = np.zeros(1, "i"), np.zeros(1, "i"), []
        receive, send = comm.Recv_init(x, left, 2), prepare(y, right, 2)
        for step in range(3):
            y[0] = 10 * step + rank
            receive.Start()
            comm.Barrier()
            send.Start()
            MPI.Request.Waitall([send, receive])
            found.append(x.tolist())
        yield label, (found, bool(receive), receive.Test(), receive.Wait())
        MPI.Prequest.Startall([receive, send])
        MPI.Request.Waitall([receive, send])
        receive.Free()
        send.free()
        yield "Free", (receive == MPI.REQUEST_NULL, type(receive).__name__)
    MPI.Detach_buffer()
    idle = comm.Recv_init(x, left, 2)
    yield "inactive", (idle.Test(), index(MPI.Request.Waitany([idle])), MPI.Request.Waitsome([idle]))
    idle.Free()
    yield "null", refused(MPI.Prequest().Start)
    for prepare in (comm.Send_init, comm.Ssend_init, comm.Bsend_init, comm.Recv_init):
        yield (
            f"{prepare.__name__}, refused",
            [refused(prepare, x, *where) for where in ((comm.size,), (-7,), (left, -5))],
        )


@section
def canceled():
    status = MPI.Status()
    receive = comm.Irecv(np.zeros(1), left, 77)
    receive.Cancel()
    receive.Wait(status)
    yield "Cancel", (status.Is_cancelled(), status.cancelled, receive == MPI.REQUEST_NULL)
    (receive,) = to_myself(78)
    receive.cancel()
    yield "cancel", (receive.wait(status), status.Is_cancelled())
    receives = [comm.Irecv(np.zeros(1), rank, tag) for tag in (81, 82)] + [comm.Recv_init(np.zeros(1), rank, 83)]
    receives[2].Start()
    for each in receives[::2]:
        each.Cancel()
    comm.Send(np.zeros(1), rank, 82)
    statuses = [MPI.Status() for _ in receives]
    yield "one of several", (MPI.Request.Waitall(receives, statuses), [*map(bool, receives)])
    yield "statuses", [(each.Is_cancelled(), each.Get_count()) for each in statuses]
    yield "again", (receives[2].Test(status), status.Is_cancelled())
    receives[2].Free()
    receive = comm.Irecv(x := np.zeros(1), rank, 79)
    comm.Send(np.ones(1), rank, 79)
    while not receive.Get_status():
        pass
    receive.Cancel()
    receive.Wait(status)
    yield "too late", (status.Is_cancelled(), x.tolist())
    comm.Isend(np.full(1, rank * 1.0), right, 80).Free()
    comm.Recv(x, left, 80)
    yield "Free", x.tolist()


@section
def generalized():
    calls = []

    def query(status, *args, **kwargs):
        status.Set_source(7)
        status.tag = 8
        status.Set_elements(MPI.INT, 3)
        status.Set_cancelled(False)
        calls.append(("query", args, kwargs))

    def free(*args, **kwargs):
        calls.append(("free", args, kwargs))

    def cancel(completed, *args, **kwargs):
        calls.append(("cancel", completed, args, kwargs))

    request = MPI.Grequest.Start(query, free, cancel, (1,), {"two": 2})
    yield "Test", (request.Test(), type(request).__name__)
    request.Cancel()
    request.Complete()
    status = MPI.Status()
    yield "Wait", (request.Wait(status), described(status), status.Get_count(MPI.INT), request == MPI.REQUEST_NULL)
    yield "calls", calls
    request = MPI.Grequest.Start()
    request.complete("outcome")
    yield "complete", request.wait()
    request = MPI.Grequest.Start(lambda status: None)
    request.Complete()
    yield "test", request.test()


@section
def handles():
    request = comm.Irecv(np.zeros(1), rank, 90)
    same = MPI.Request.fromhandle(request.handle)
    yield "equal", (same == request, MPI.Request(request) == request, request != MPI.REQUEST_NULL)
    comm.Send(np.zeros(1), rank, 90)
    request.Wait()
    yield "kinds", (refused(MPI.Prequest, MPI.REQUEST_NULL), refused(MPI.Grequest, MPI.REQUEST_NULL))


report()
