"""Collectives of arrays: blocking, nonblocking and persistent."""

from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import IN_PLACE
from ringcomm.mpi4py.base.errors import FAILURES
from ringcomm.mpi4py.calls import moves, reductions
from ringcomm.mpi4py.calls import op as ops
from ringcomm.mpi4py.calls.checked import forms
from ringcomm.mpi4py.calls.op import SUM, Op
from ringcomm.mpi4py.groups.context import Context

__all__ = ["Collectives"]

ndarray = np.ndarray

# The operations that a plain call passes on without a look at its dtype, by the id of their handle.
NATIVE = {id(getattr(ops, name.upper())): name for name in ("sum", "prod", "min", "max")}


class Collectives:
    """The collectives of a communicator on arrays."""

    _object: Context

    _barrier, Ibarrier, Barrier_init = forms(moves.barrier)
    _bcast, Ibcast, Bcast_init = forms(moves.bcast)
    _gather, Igather, Gather_init = forms(moves.gather)
    Gatherv, Igatherv, Gatherv_init = forms(moves.gatherv)
    _scatter, Iscatter, Scatter_init = forms(moves.scatter)
    Scatterv, Iscatterv, Scatterv_init = forms(moves.scatterv)
    _allgather, Iallgather, Allgather_init = forms(moves.allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = forms(moves.allgatherv)
    _alltoall, Ialltoall, Alltoall_init = forms(moves.alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = forms(moves.alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = forms(moves.alltoallw)
    _reduce, Ireduce, Reduce_init = forms(reductions.reduce)
    _allreduce, Iallreduce, Allreduce_init = forms(reductions.allreduce)
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(reductions.reduce_scatter)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms(reductions.reduce_scatter_block)
    Scan, Iscan, Scan_init = forms(reductions.scan)
    Exscan, Iexscan, Exscan_init = forms(reductions.exscan)

    # Plain arrays go straight to ringcomm, which costs tenths of a microsecond, the general way several ones. They
    # move as bytes, too, since other ranks may go the general way.

    def Barrier(self) -> None:
        """Wait until all ranks have called this."""
        context = self._object
        try:
            if context.fast.barrier(None, False) is NotImplemented:
                context.comm.barrier()
        except FAILURES as error:
            context.fail(error)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the array of `root` to all ranks."""
        context = self._object
        try:
            if context.fast.broadcast_bytes(buf, None, root, False) is NotImplemented:
                self._bcast(buf, root)
        except FAILURES as error:
            context.fail(error)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect blocks of equal size on `root`, in rank order."""
        context = self._object
        try:
            if context.fast.gather_bytes(sendbuf, recvbuf, root, False) is NotImplemented:
                self._gather(sendbuf, recvbuf, root)
        except FAILURES as error:
            context.fail(error)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Divide the array of `root` into blocks of equal size, one for each rank."""
        context = self._object
        try:
            if context.fast.scatter_bytes(sendbuf, recvbuf, root, False) is NotImplemented:
                self._scatter(sendbuf, recvbuf, root)
        except FAILURES as error:
            context.fail(error)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect blocks of equal size on all ranks, in rank order."""
        context = self._object
        try:
            if context.fast.all_gather_bytes(sendbuf, recvbuf, False) is NotImplemented:
                self._allgather(sendbuf, recvbuf)
        except FAILURES as error:
            context.fail(error)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send block j to rank j, and receive block i from rank i; all are of one size."""
        context = self._object
        try:
            if context.fast.all_to_all_bytes(sendbuf, recvbuf, False) is NotImplemented:
                self._alltoall(sendbuf, recvbuf)
        except FAILURES as error:
            context.fail(error)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Reduce the arrays of all ranks on `root`."""
        context, name = self._object, NATIVE.get(id(op))
        target = recvbuf if context.rank == root else None
        plain = name and type(sendbuf) is ndarray and (type(target) is ndarray or context.rank != root)
        try:
            if not plain or context.fast.reduce(sendbuf, target, name, root, None, False) is NotImplemented:
                self._reduce(sendbuf, recvbuf, op, root)
        except FAILURES as error:
            context.fail(error)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce the arrays of all ranks on every rank."""
        context, name = self._object, NATIVE.get(id(op))
        try:
            if name and type(recvbuf) is ndarray:
                if type(sendbuf) is ndarray:
                    done = context.fast.all_reduce(sendbuf, recvbuf, name, None, False)
                elif sendbuf is IN_PLACE:
                    done = context.fast.all_reduce(recvbuf, None, name, None, False)
                else:
                    done = NotImplemented
                if done is not NotImplemented:
                    return
            self._allreduce(sendbuf, recvbuf, op)
        except FAILURES as error:
            context.fail(error)
