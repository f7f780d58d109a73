"""Messages of arrays: every kind of send and receive, probes, statuses, what nobody gets, and what is refused."""

import numpy as np
from mpi4py import MPI
from sections import comm, described, left, named, rank, refused, report, right, section, size


@section
def sends():
    for tag, (send, label) in enumerate(
        [(comm.Send, "Send"), (comm.Ssend, "Ssend"), (comm.Bsend, "Bsend"), (comm.Rsend, "Rsend")]
    ):
        MPI.Attach_buffer(bytearray(4096 + MPI.BSEND_OVERHEAD))
        x, status = np.zeros(3, "i"), MPI.Status()
        receive = comm.Irecv(x, left, tag)
        comm.Barrier()  # Rsend needs a receive that has started
        send(np.arange(3, dtype="i") + 10 * rank, right, tag)
        receive.Wait(status)
        MPI.Detach_buffer()
        yield label, (x.tolist(), described(status), status.Get_count(MPI.INT))


@section
def nonblocking_sends():
    for tag, (send, label) in enumerate(
        [(comm.Isend, "Isend"), (comm.Issend, "Issend"), (comm.Ibsend, "Ibsend"), (comm.Irsend, "Irsend")]
    ):
        MPI.Attach_buffer(bytearray(4096 + MPI.BSEND_OVERHEAD))
        x = np.zeros(1)
        receive = comm.Irecv(x, left, tag)
        comm.Barrier()
        request = send(np.array([rank + 0.5]), right, tag)
        MPI.Request.Waitall([request, receive])
        MPI.Detach_buffer()
        yield label, x.tolist()


@section
def attached_memory():
    memory = bytearray(1000 + 8 * MPI.BSEND_OVERHEAD)
    yield "Attach_buffer", MPI.Attach_buffer(memory)
    comm.Bsend(np.array([rank]), right, 1)
    x = np.zeros(1, int)
    comm.Recv(x, left, 1)
    detached = MPI.Detach_buffer()
    yield "Detach_buffer", (x.tolist(), len(detached) == len(memory))


@section
def exchanges():
    status, x = MPI.Status(), np.zeros(4, "i")
    comm.Sendrecv(np.arange(3, dtype="i") + rank, right, 5, x, left, MPI.ANY_TAG, status)
    yield "Sendrecv", (x.tolist(), described(status), status.Get_count(MPI.INT), status.Get_elements(MPI.INT))
    comm.Sendrecv_replace(x, left, 1, right, 1)
    yield "Sendrecv_replace", x.tolist()
    request = comm.Isendrecv(np.array([rank], "i"), right, 2, y := np.zeros(1, "i"), left, 2)
    request.Wait(status)
    yield "Isendrecv", (y.tolist(), status.source == left)
    request = comm.Isendrecv_replace(y, right, 3, left, 3)
    request.Wait()
    yield "Isendrecv_replace", y.tolist()


@section
def any_source():
    status, found = MPI.Status(), []
    if rank == 0:
        for _ in range(size - 1):
            x = np.zeros(1, "i")
            comm.Recv(x, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            found.append((status.source, status.tag, int(x[0])))
    else:
        comm.Send(np.array([rank * rank], "i"), 0, 10 + rank)
    yield "ANY_SOURCE, ANY_TAG", sorted(found)
    comm.Barrier()  # before the next message with any tag
    for tag in (1, 2, 3):
        comm.Isend(np.array([tag], "i"), right, tag).Free()
    order = []
    for tag in (3, 1, 2):
        x = np.zeros(1, "i")
        comm.Recv(x, left, tag)
        order.append(int(x[0]))
    yield "by tag", order


@section
def probes():
    status = MPI.Status()
    sending = comm.Isend(np.arange(5, dtype="d"), right, 4)
    yield "Probe", (comm.Probe(left, 4, status), described(status), status.Get_count(MPI.DOUBLE))
    yield "Iprobe", (comm.Iprobe(left, 4, status), described(status), comm.Iprobe(left, 999))
    x = np.zeros(5)
    message = comm.Mprobe(left, 4, status)
    yield "Mprobe", (described(status), type(message).__name__, comm.Iprobe(left, 4))
    message.Recv(x, status)
    sending.Wait()
    yield "Message.Recv", (x.tolist(), described(status), message == MPI.MESSAGE_NULL)
    sending = comm.Isend(x, right, 5)
    comm.Probe(left, 5)
    message = comm.Improbe(left, 5)
    request = message.Irecv(x)
    request.Wait(status)
    sending.Wait()
    yield "Improbe, Irecv", (described(status), message == MPI.MESSAGE_NULL, comm.Improbe(left, 5))
    sending = comm.Isend(x, right, 6)
    message = MPI.Message.Probe(comm, left, 6)
    message.Recv(x)
    sending.Wait()
    yield "Message.Probe", (x.tolist(), MPI.Message.Iprobe(comm, left, 6))
    yield "truth", (bool(MPI.MESSAGE_NULL), bool(MPI.MESSAGE_NO_PROC))


@section
def nobody():
    status, x = MPI.Status(), np.full(2, 7.0)
    for send in (comm.Send, comm.Ssend, comm.Rsend):
        send(x, MPI.PROC_NULL)
    comm.Recv(x, MPI.PROC_NULL, status=status)
    yield "Recv", (described(status), x.tolist())
    yield "Probe", (comm.Probe(MPI.PROC_NULL, 1, status), described(status), comm.Iprobe(MPI.PROC_NULL))
    message = comm.Mprobe(MPI.PROC_NULL)
    yield "Mprobe", message == MPI.MESSAGE_NO_PROC
    message.Recv(x, status)
    yield "Message.Recv", (described(status), message == MPI.MESSAGE_NULL)
    requests = [comm.Irecv(x, MPI.PROC_NULL), comm.Isend(x, MPI.PROC_NULL), comm.Issend(x, MPI.PROC_NULL)]
    yield "Waitall", (MPI.Request.Waitall(requests), x.tolist())
    comm.Sendrecv(x, MPI.PROC_NULL, 0, x.copy(), MPI.PROC_NULL, 0, status)
    yield "Sendrecv", described(status)
    line = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank < size - 1 else MPI.PROC_NULL)
    comm.Sendrecv(np.array([rank * 1.0, 0]), line[1], 0, x, line[0], 0, status)
    yield "shifted along a line", (x.tolist(), named(status.source, "PROC_NULL"))


@section
def truncated():
    sending = comm.Isend(np.zeros(2, "i"), right, 9)
    yield "Recv", refused(comm.Recv, np.zeros(1, "i"), left, 9)
    sending.Wait()
    if size > 1:  # of a message to oneself, Open MPI does not tell
        receiving = comm.Irecv(np.zeros(1, "i"), left, 8)
        sending = comm.Isend(np.zeros(3, "i"), right, 8)
        yield "Irecv", refused(receiving.Wait)
        sending.Wait()
    x = np.full(4, -1, "i")
    comm.Sendrecv(np.full(3, rank, "i"), right, 7, x, left, 7)
    yield "usable", x.tolist()


@section
def refusals():
    x = np.ones(1)
    yield "ranks", [refused(call, x, size + 3) for call in (comm.Send, comm.Isend, comm.Ssend, comm.Recv, comm.Irecv)]
    yield "negative ranks", [refused(call, x, -7) for call in (comm.Send, comm.Isend, comm.Recv)]
    yield "tags", [refused(call, x, right, -5) for call in (comm.Send, comm.Isend, comm.Recv, comm.Irecv)]
    yield "arrays", (refused(comm.Send, np.ones((3, 2))[:, 0], right), refused(comm.Send, 1.5, right))
    yield "probes", (refused(comm.Probe, size), refused(comm.Iprobe, size), refused(comm.Improbe, 0, -5))
    yield "read-only", refused(comm.Recv, b"1234", left)


report()
