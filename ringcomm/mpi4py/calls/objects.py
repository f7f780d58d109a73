"""Collectives of Python objects: those of ringcomm.objects, pickled by MPI.pickle."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NoReturn

from ringcomm import objects
from ringcomm.errors import RingcommError
from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.base.pickling import pickle
from ringcomm.mpi4py.groups.context import Context
from ringcomm.mpi4py.ops.op import Op
from ringcomm.mpi4py.ops.predefined import SUM

__all__ = ["Objects"]

Operation = Op | Callable[[Any, Any], Any]


class Objects:
    """The collectives of a communicator on objects. Objects are reduced in rank order, by `op(x, y)`."""

    _object: Context

    # Without decorators and helpers, which would take tenths of a microsecond. One thread at a time makes a collective,
    # since it may be two calls.

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.Barrier()  # type: ignore[attr-defined]  # of Comm, which this is a part of

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of `root` on all ranks."""
        context = self._object
        if type(root) is not int or not 0 <= root < context.size:
            root = self._root(root)
        try:
            with context.locks["bcast"]:
                return objects.broadcast(context.comm, obj, root, None, pickle.codec)
        except RingcommError as error:
            _fail(context, error)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on `root`, None elsewhere."""
        context = self._object
        if type(root) is not int or not 0 <= root < context.size:
            root = self._root(root)
        try:
            with context.locks["gather"]:
                return objects.gather(context.comm, sendobj, root, None, pickle.codec)
        except RingcommError as error:
            _fail(context, error)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return on each rank its object of those that `root` has."""
        context = self._object
        if type(root) is not int or not 0 <= root < context.size:
            root = self._root(root)
        objs = self._one_for_each(sendobj) if context.rank == root else None
        try:
            with context.locks["scatter"]:
                return objects.scatter(context.comm, objs, root, None, pickle.codec)
        except RingcommError as error:
            _fail(context, error)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        context = self._object
        try:
            with context.locks["allgather"]:
                return objects.all_gather(context.comm, sendobj, None, pickle.codec)
        except RingcommError as error:
            _fail(context, error)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return the objects that the ranks have for this one."""
        context, objs = self._object, self._one_for_each(sendobj)
        try:
            with context.locks["alltoall"]:
                return objects.all_to_all(context.comm, objs, None, pickle.codec)
        except RingcommError as error:
            _fail(context, error)

    def reduce(self, sendobj: Any, op: Operation = SUM, root: int = 0) -> Any:
        """Return the objects of all ranks reduced on `root`, None elsewhere."""
        gathered = self.gather(sendobj, root)
        return None if gathered is None else reduce(op, gathered)

    def allreduce(self, sendobj: Any, op: Operation = SUM) -> Any:
        """Return the objects of all ranks reduced."""
        return reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Operation = SUM) -> Any:
        """Return the objects of the ranks up to this one reduced."""
        gathered = self.allgather(sendobj)
        return reduce(op, gathered[: self._object.rank + 1])

    def exscan(self, sendobj: Any, op: Operation = SUM) -> Any:
        """Return the objects of the ranks below this one reduced, None on rank 0."""
        gathered = self.allgather(sendobj)
        return reduce(op, gathered[: self._object.rank]) if self._object.rank else None

    @handled
    def _root(self, root: int) -> int:
        return self._object.check_root(root)

    def _one_for_each(self, objs: Sequence[Any] | None) -> list[Any]:
        size = self._object.size
        found = [None] * size if objs is None else list(objs)  # as in mpi4py
        if len(found) != size:
            raise ValueError(f"expected {size} items, got {len(found)}")
        return found


def _fail(context: Context, error: RingcommError) -> NoReturn:
    """Raise the error of pickling where it happened, else that of ringcomm."""
    if isinstance(error.__cause__, Exception):
        raise error.__cause__ from None
    context.fail(error)
