"""The modules of mpi4py that are written in Python, and what these and other libraries read of its internals."""

import mpi4py.typing
import numpy as np
from mpi4py import MPI
from mpi4py.futures import _core
from mpi4py.util import dtlib, pkl5, sync
from sections import comm, left, rank, report, right, section, size


@section
def internals():
    names = ("INT", "LONG", "BYTE", "CXX_BOOL", "INT64_T", "FLOAT_INT", "DATATYPE_NULL")
    yield "codes", [MPI._typecode(getattr(MPI, name)) for name in names]
    yield "of made types", (MPI._typecode(MPI.INT.Create_contiguous(2)), MPI._typecode(MPI.INT.Dup()))
    locks = [MPI._comm_lock(comm, key) for key in ("send", "send", "recv")]
    yield "locks", (locks[0] is locks[1], locks[0] is locks[2], locks[0].locked(), len(MPI._comm_lock_table(comm)) > 1)
    inner, _ = MPI._commctx_intra(comm)
    yield "inner", (inner == comm, inner.size, MPI._commctx_intra(comm)[0] == inner)
    yield "pool", (_core.SharedPool, _core.MPI is MPI)
    yield "typing", hasattr(mpi4py.typing, "BufSpec")


@section
def objects_beside_their_buffers():
    blocksize = pkl5._BigMPI.blocksize
    large = [np.full(100_000, rank), f"rank {rank}"]
    for pkl5._BigMPI.blocksize in (blocksize, 1000):  # in one piece, and as a message of more than 2 GB
        five = pkl5.Intracomm(comm)
        request = five.isend(large, right)
        received = five.recv(source=left)
        request.wait()
        yield "message", (int(received[0].sum()), received[1])
        request = five.issend(large, right)
        message = five.mprobe(left)
        yield "probed", message.recv()[1]
        request.wait()
        yield "exchanged", five.sendrecv(large, right, 0, None, left)[1]
        yield "broadcast", five.bcast(large, size - 1)[1]
        yield "gathered", [each[1] for each in five.gather(large, 0) or []]
        yield "scattered", five.scatter([large] * size, 0)[1]
        yield "gathered everywhere", [int(each[0].sum()) for each in five.allgather(large)]
        yield "exchanged by all", [each[1] for each in five.alltoall([large] * size)]
    pkl5._BigMPI.blocksize = blocksize


@section
def helpers():
    with sync.Sequential(comm):
        pass
    yield "types", (dtlib.to_numpy_dtype(MPI.INT).str, dtlib.from_numpy_dtype("f8") == MPI.DOUBLE)


report()
