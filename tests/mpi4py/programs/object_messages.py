"""Messages of objects, which are pickled: lowercase sends, receives, exchanges and probes."""

from mpi4py import MPI
from sections import comm, described, left, rank, refused, report, right, section, size

MINE = {"rank": rank, "list": [rank] * 3}


def from_left(received):
    return received == {"rank": left, "list": [left] * 3}


@section
def sends():
    MPI.Attach_buffer(bytearray(1 << 16))
    for tag, (send, label) in enumerate([(comm.send, "send"), (comm.ssend, "ssend"), (comm.bsend, "bsend")]):
        receiving = comm.irecv(source=left, tag=tag)
        send(MINE, right, tag)
        yield label, from_left(receiving.wait())
    for tag, (send, label) in enumerate([(comm.isend, "isend"), (comm.issend, "issend"), (comm.ibsend, "ibsend")]):
        request = send(MINE, right, tag)
        status = MPI.Status()
        received = comm.recv(source=left, tag=tag, status=status)
        yield label, (from_left(received), request.wait(), status.source == left, status.tag)
    MPI.Detach_buffer()


@section
def receives():
    receiving = comm.irecv(source=left, tag=1)
    comm.send(MINE, right, 1)
    yield "irecv", from_left(receiving.wait())
    receiving = comm.irecv(1 << 20, left, 2)
    sending = comm.isend("x" * 500_000, right, 2)
    yield "irecv, large", len(receiving.wait())
    sending.wait()
    receiving = comm.irecv(bytearray(2000), left, 3)
    comm.send(MINE, right, 3)
    yield "irecv, own memory", from_left(receiving.wait())
    status = MPI.Status()
    yield "sendrecv", from_left(comm.sendrecv(MINE, right, 4, None, left, 4, status))
    yield "status", (status.source == left, status.tag)
    received = [comm.sendrecv("x" * length, right, source=left) for length in (0, 10_000, 1_000_000)]
    yield "sizes", [len(each) for each in received]


@section
def any_source():
    found, status = [], MPI.Status()
    if rank == 0:
        for _ in range(size - 1):
            obj = comm.recv(status=status)
            found.append((obj, status.Get_source(), status.Get_tag()))
    else:
        comm.send(f"from {rank}", 0, rank)
    yield "recv", sorted(found)
    comm.barrier()  # before the next message with any tag


@section
def probes():
    status = MPI.Status()
    sending = comm.issend(MINE, right, 3)
    yield "probe", (comm.probe(left, 3, status), status.source == left, status.tag)
    yield "iprobe", (comm.iprobe(left, 3), comm.iprobe(left, 999))
    message = comm.mprobe(MPI.ANY_SOURCE, 3, status)
    yield "mprobe", (status.source == left, status.tag, comm.iprobe(tag=3))
    yield "Message.recv", (from_left(message.recv(status)), sending.wait(), status.tag, message == MPI.MESSAGE_NULL)
    sending = comm.isend(MINE, right, 4)
    comm.probe(left, 4)
    receiving = comm.improbe(left, 4).irecv()
    yield "improbe, irecv", (from_left(receiving.wait()), comm.improbe(left, 4))
    sending.wait()
    sending = comm.isend(MINE, right, 5)
    yield "Message.probe", from_left(MPI.Message.probe(comm, left, 5).recv())
    sending.wait()
    yield "Message.iprobe", MPI.Message.iprobe(comm, left, 5)


@section
def singletons():
    for each in (None, NotImplemented, ..., False):
        sending = comm.isend(each, right)
        yield repr(each), comm.recv(source=left) is each
        sending.wait()
    sending = comm.Isend([bytearray(), MPI.BYTE], right)
    yield "of no bytes", comm.recv(source=left)
    sending.Wait()


@section
def nobody():
    for send in (comm.send, comm.ssend):
        send(MINE, MPI.PROC_NULL)
    status = MPI.Status()
    yield "recv", (comm.recv(source=MPI.PROC_NULL, status=status), described(status))
    yield "irecv", comm.irecv(source=MPI.PROC_NULL).wait()
    yield "isend", comm.isend(MINE, MPI.PROC_NULL).wait()
    yield "sendrecv", comm.sendrecv(MINE, MPI.PROC_NULL, source=MPI.PROC_NULL)
    yield "mprobe", comm.mprobe(MPI.PROC_NULL).recv()


@section
def refusals():
    yield "ranks", (refused(comm.send, 1, size), refused(comm.isend, 1, -9), refused(comm.recv, None, size))
    yield "tags", (refused(comm.send, 1, right, -5), refused(comm.recv, None, left, -5))
    yield "usable", comm.sendrecv(rank, right, source=left) == left


report()
