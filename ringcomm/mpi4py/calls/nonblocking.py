"""Nonblocking collectives of plain arrays: straight to the core, as the blocking ones of collectives.py."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import IN_PLACE
from ringcomm.mpi4py.base.errors import FAILURES
from ringcomm.mpi4py.calls.collectives import NATIVE, Collectives
from ringcomm.mpi4py.calls.op import SUM, Op
from ringcomm.mpi4py.requests.request import Request

__all__ = ["NonblockingCollectives"]

ndarray = np.ndarray


class NonblockingCollectives(Collectives):
    """The collectives of a communicator on arrays. These start them in the core if the arrays are plain."""

    def Ibarrier(self) -> Request:
        """Start a nonblocking call: Wait until all ranks have called this."""
        request = self._start(self._object.fast.barrier, None)
        return super().Ibarrier() if request is None else request

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Copy the array of `root` to all ranks."""
        request = self._start(self._object.fast.broadcast_bytes, buf, None, root)
        return super().Ibcast(buf, root) if request is None else request

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Collect blocks of equal size on `root`, in rank order."""
        request = self._start(self._object.fast.gather_bytes, sendbuf, recvbuf, root)
        return super().Igather(sendbuf, recvbuf, root) if request is None else request

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start a nonblocking call: Divide the array of `root` into blocks of equal size, one for each rank."""
        request = self._start(self._object.fast.scatter_bytes, sendbuf, recvbuf, root)
        return super().Iscatter(sendbuf, recvbuf, root) if request is None else request

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a nonblocking call: Collect blocks of equal size on all ranks, in rank order."""
        request = self._start(self._object.fast.all_gather_bytes, sendbuf, recvbuf)
        return super().Iallgather(sendbuf, recvbuf) if request is None else request

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start a nonblocking call: Send block j to rank j, and receive block i from rank i; all are of one size."""
        request = self._start(self._object.fast.all_to_all_bytes, sendbuf, recvbuf)
        return super().Ialltoall(sendbuf, recvbuf) if request is None else request

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start a nonblocking call: Reduce the arrays of all ranks on `root`."""
        context, name, request = self._object, NATIVE.get(id(op)), None
        target = recvbuf if context.rank == root else None
        if name and type(sendbuf) is ndarray and (type(target) is ndarray or context.rank != root):
            request = self._start(context.fast.reduce, sendbuf, target, name, root, None)
        return super().Ireduce(sendbuf, recvbuf, op, root) if request is None else request

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start a nonblocking call: Reduce the arrays of all ranks on every rank."""
        fast, name, request = self._object.fast, NATIVE.get(id(op)), None
        if name and type(recvbuf) is ndarray:
            if type(sendbuf) is ndarray:
                request = self._start(fast.all_reduce, sendbuf, recvbuf, name, None)
            elif sendbuf is IN_PLACE:
                request = self._start(fast.all_reduce, recvbuf, None, name, None)
        return super().Iallreduce(sendbuf, recvbuf, op) if request is None else request

    def _start(self, collective: Callable[..., Any], *arguments: Any) -> Request | None:
        """Start a collective of the fast path, or return None if it is not plain."""
        context = self._object
        try:
            operation = context.requests.operation(context)
            if collective(*arguments, operation) is NotImplemented:
                return None
            request: Request = context.requests.request(operation)
            return request
        except FAILURES as error:
            context.fail(error)
            raise
