"""Error handlers: what a program has done about errors of a communicator."""

from collections.abc import Callable
from typing import Any, Self
from weakref import WeakSet

from ringcomm.mpi4py.base.errors import ERR_ERRHANDLER
from ringcomm.mpi4py.base.handles import Handle, constant

__all__ = ["ERRHANDLER_NULL", "ERRORS_ABORT", "ERRORS_ARE_FATAL", "ERRORS_RETURN", "Errhandler"]

MAX_HANDLERS = 32  # that mpi4py allows


class Reaction:
    """What an error handler does: `function(object, code)`, None for the predefined ones."""

    def __init__(self, function: Callable[[Any, int], object] | None = None) -> None:
        self.function = function


_created: WeakSet[Reaction] = WeakSet()


class Errhandler(Handle):
    """An error handler."""

    _object: Reaction | None
    _null = ERR_ERRHANDLER, "an error handler", "ERRHANDLER_NULL"

    @property
    def function(self) -> Callable[[Any, int], object] | None:
        """The function that the program gave, None for the predefined handlers."""
        return None if self._object is None else self._object.function

    @classmethod
    def _create(cls, function: Callable[[Any, int], object]) -> Self:
        """Return the handler that calls a function, for the `Create_errhandler` of a class."""
        if len(_created) >= MAX_HANDLERS:
            raise RuntimeError(f"more than {MAX_HANDLERS} error handlers; free some of them")
        reaction = Reaction(function)
        _created.add(reaction)
        return cls._of(reaction)

    def Free(self) -> None:
        """Free the handler; a communicator that has it keeps it. Constants stay as they are."""
        if not (self and self._is_constant):
            super().Free()


ERRHANDLER_NULL: Errhandler = constant("ERRHANDLER_NULL", Errhandler())
ERRORS_RETURN: Errhandler = constant("ERRORS_RETURN", Errhandler._of(Reaction()))
ERRORS_ABORT: Errhandler = constant("ERRORS_ABORT", Errhandler._of(Reaction()))
ERRORS_ARE_FATAL: Errhandler = constant("ERRORS_ARE_FATAL", Errhandler._of(Reaction()))
