"""Collectives of arrays: blocking, nonblocking and persistent."""

from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import IN_PLACE
from ringcomm.mpi4py.calls import moves, reductions
from ringcomm.mpi4py.calls.forms import forms
from ringcomm.mpi4py.groups.context import Context
from ringcomm.mpi4py.ops import predefined
from ringcomm.mpi4py.ops.op import Op
from ringcomm.mpi4py.ops.predefined import SUM
from ringcomm.mpi4py.requests.request import Request

__all__ = ["Collectives"]

ndarray = np.ndarray

# The operations that a plain call passes on without a look at its dtype, by the id of their handle.
NATIVE = {id(getattr(predefined, name.upper())): name for name in ("sum", "prod", "min", "max")}


class Collectives:
    """The collectives of a communicator on arrays."""

    _object: Context

    _barrier, _ibarrier, Barrier_init = forms(moves.barrier)
    _bcast, _ibcast, Bcast_init = forms(moves.bcast)
    _gather, _igather, Gather_init = forms(moves.gather)
    Gatherv, Igatherv, Gatherv_init = forms(moves.gatherv)
    _scatter, _iscatter, Scatter_init = forms(moves.scatter)
    Scatterv, Iscatterv, Scatterv_init = forms(moves.scatterv)
    _allgather, _iallgather, Allgather_init = forms(moves.allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = forms(moves.allgatherv)
    _alltoall, _ialltoall, Alltoall_init = forms(moves.alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = forms(moves.alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = forms(moves.alltoallw)
    _reduce, _ireduce, Reduce_init = forms(reductions.reduce)
    _allreduce, _iallreduce, Allreduce_init = forms(reductions.allreduce)
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(reductions.reduce_scatter)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms(reductions.reduce_scatter_block)
    Scan, Iscan, Scan_init = forms(reductions.scan)
    Exscan, Iexscan, Exscan_init = forms(reductions.exscan)

    # Plain arrays go straight to the core, which takes tenths of a microsecond, the general way several. They move as
    # bytes, too, since other ranks may go the general way. Each method calls the core itself: a common one took 0.15 µs
    # of the 0.95 µs of an Iallreduce and its Wait. What the core raises here is an error of MPI already: see Context.

    def Barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self._object.fast.barrier(None, False) is NotImplemented:
            self._barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the array of `root` to all ranks."""
        if self._object.fast.broadcast_bytes(buf, None, root, False) is NotImplemented:
            self._bcast(buf, root)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect blocks of equal size on `root`, in rank order."""
        if self._object.fast.gather_bytes(sendbuf, recvbuf, root, False) is NotImplemented:
            self._gather(sendbuf, recvbuf, root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Divide the array of `root` into blocks of equal size, one for each rank."""
        if self._object.fast.scatter_bytes(sendbuf, recvbuf, root, False) is NotImplemented:
            self._scatter(sendbuf, recvbuf, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect blocks of equal size on all ranks, in rank order."""
        if self._object.fast.all_gather_bytes(sendbuf, recvbuf, False) is NotImplemented:
            self._allgather(sendbuf, recvbuf)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send block j to rank j, and receive block i from rank i; all are of one size."""
        if self._object.fast.all_to_all_bytes(sendbuf, recvbuf, False) is NotImplemented:
            self._alltoall(sendbuf, recvbuf)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Reduce the arrays of all ranks on `root`."""
        context, name = self._object, NATIVE.get(id(op))
        target = recvbuf if context.rank == root else None
        plain = name and type(sendbuf) is ndarray and (type(target) is ndarray or context.rank != root)
        if not plain or context.fast.reduce(sendbuf, target, name, root, None, False) is NotImplemented:
            self._reduce(sendbuf, recvbuf, op, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce the arrays of all ranks on every rank."""
        context, name = self._object, NATIVE.get(id(op))
        if name and type(recvbuf) is ndarray:
            if type(sendbuf) is ndarray:
                if context.fast.all_reduce(sendbuf, recvbuf, name, None, False) is not NotImplemented:
                    return
            elif sendbuf is IN_PLACE and context.fast.all_reduce(recvbuf, None, name, None, False) is recvbuf:
                return
        self._allreduce(sendbuf, recvbuf, op)

    def Ibarrier(self) -> Request:
        """Start a nonblocking call: Wait until all ranks have called this."""
        context = self._object
        request: Request = context.requests.barrier(context, None)
        return self._ibarrier() if request is NotImplemented else request

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Copy the array of `root` to all ranks."""
        context = self._object
        request: Request = context.requests.broadcast(context, buf, None, root)
        return self._ibcast(buf, root) if request is NotImplemented else request

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Collect blocks of equal size on `root`, in rank order."""
        context = self._object
        request: Request = context.requests.gather(context, sendbuf, recvbuf, root)
        return self._igather(sendbuf, recvbuf, root) if request is NotImplemented else request

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Divide the array of `root` into blocks of equal size, one for each rank."""
        context = self._object
        request: Request = context.requests.scatter(context, sendbuf, recvbuf, root)
        return self._iscatter(sendbuf, recvbuf, root) if request is NotImplemented else request

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a nonblocking call: Collect blocks of equal size on all ranks, in rank order."""
        context = self._object
        request: Request = context.requests.all_gather(context, sendbuf, recvbuf)
        return self._iallgather(sendbuf, recvbuf) if request is NotImplemented else request

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a nonblocking call: Send block j to rank j, and receive block i from rank i; all are of one size."""
        context = self._object
        request: Request = context.requests.all_to_all(context, sendbuf, recvbuf)
        return self._ialltoall(sendbuf, recvbuf) if request is NotImplemented else request

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start a nonblocking call: Reduce the arrays of all ranks on `root`."""
        context, name = self._object, NATIVE.get(id(op))
        target, request = (recvbuf if context.rank == root else None), NotImplemented
        if name and type(sendbuf) is ndarray and (type(target) is ndarray or context.rank != root):
            request = context.requests.reduce(context, sendbuf, target, name, root, None)
        return self._ireduce(sendbuf, recvbuf, op, root) if request is NotImplemented else request

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a nonblocking call: Reduce the arrays of all ranks on every rank."""
        context, name, request = self._object, NATIVE.get(id(op)), NotImplemented
        if name and type(recvbuf) is ndarray:
            if type(sendbuf) is ndarray:
                request = context.requests.all_reduce(context, sendbuf, recvbuf, name, None)
            elif sendbuf is IN_PLACE:
                request = context.requests.all_reduce(context, recvbuf, None, name, None)
        return self._iallreduce(sendbuf, recvbuf, op) if request is NotImplemented else request
