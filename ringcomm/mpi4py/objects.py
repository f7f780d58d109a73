"""Collectives of Python objects: those of ringcomm.objects, pickled by MPI.pickle."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ringcomm import objects
from ringcomm.errors import RingcommError
from ringcomm.mpi4py.errors import handled
from ringcomm.mpi4py.op import SUM, Op
from ringcomm.mpi4py.pickling import pickle

__all__ = ["Objects"]

Operation = Op | Callable[[Any, Any], Any]


class Objects:
    """The collectives of a communicator on objects. Objects are reduced in rank order, by `op(x, y)`."""

    _object: Any  # a Context

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.Barrier()  # type: ignore[attr-defined]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of `root` on all ranks."""
        return self._call("bcast", objects.broadcast, obj, self._root(root))

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on `root`, None elsewhere."""
        gathered: list[Any] | None = self._call("gather", objects.gather, sendobj, self._root(root))
        return gathered

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return on each rank its object of those that `root` has."""
        context = self._object
        objs = self._one_for_each(sendobj) if context.rank == root else None
        return self._call("scatter", objects.scatter, objs, self._root(root))

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        context = self._object
        try:  # as _call does, and faster
            with context.locks["allgather"]:
                return objects.all_gather(context.comm, sendobj, None, pickle)
        except RingcommError as error:
            _fail(context, error)
            raise

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return the objects that the ranks have for this one."""
        received: list[Any] = self._call("alltoall", objects.all_to_all, self._one_for_each(sendobj))
        return received

    def reduce(self, sendobj: Any, op: Operation = SUM, root: int = 0) -> Any:
        """Return the objects of all ranks reduced on `root`, None elsewhere."""
        gathered = self._call("reduce", objects.gather, sendobj, self._root(root))
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

    def _call(self, name: str, collective: Callable[..., Any], *args: Any) -> Any:
        """Run a collective of objects. One thread at a time, since it may be two calls."""
        context = self._object
        try:
            with context.locks[name]:
                return collective(context.comm, *args, codec=pickle)
        except RingcommError as error:
            _fail(context, error)
            raise

    @handled
    def _root(self, root: int) -> int:
        checked: int = self._object.check_root(root)
        return checked

    def _one_for_each(self, objs: Sequence[Any] | None) -> list[Any]:
        size = self._object.size
        found = [None] * size if objs is None else list(objs)  # as in mpi4py
        if len(found) != size:
            raise ValueError(f"expected {size} items, got {len(found)}")
        return found


def _fail(context: Any, error: RingcommError) -> None:
    """Raise the error of pickling where it happened, else that of ringcomm."""
    if isinstance(error.__cause__, Exception):
        raise error.__cause__ from None
    context.fail(error)
