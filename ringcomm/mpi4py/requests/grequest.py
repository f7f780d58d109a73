"""Generalized requests, which the program completes itself."""

from typing import Any, Self

from ringcomm.mpi4py.base.errors import ERR_REQUEST, failure
from ringcomm.mpi4py.requests.operations import General
from ringcomm.mpi4py.requests.request import Request

__all__ = ["Grequest"]


class Grequest(Request):
    """An operation of the program, which it completes itself."""

    @classmethod
    def _check_kind(cls, named: Any) -> None:
        if not isinstance(named, General):
            raise TypeError("expected a generalized request")

    @classmethod
    def Start(
        cls, query_fn: Any = None, free_fn: Any = None, cancel_fn: Any = None, args: Any = None, kwargs: Any = None
    ) -> Self:
        """Create a request. MPI calls query_fn(status), free_fn() and cancel_fn(completed), and appends `args`."""
        return cls._of(General(query_fn, free_fn, cancel_fn, args, kwargs))

    def Complete(self) -> None:
        """Tell MPI that the operation is complete."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """Tell MPI that the operation is complete, and that `wait` returns `obj`."""
        if not isinstance(self._object, General):
            raise failure(ERR_REQUEST, "expected a generalized request, got one that is complete")
        self._object.end(obj)
