"""The status of a message or operation."""

from __future__ import annotations

from array import array
from typing import Any, Self

from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, UNDEFINED
from ringcomm.mpi4py.base.errors import SUCCESS
from ringcomm.mpi4py.base.integers import integral
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.datatypes.predefined import BYTE

__all__ = ["F_ERROR", "F_SOURCE", "F_STATUS_SIZE", "F_TAG", "Status"]

F_SOURCE, F_TAG, F_ERROR, COUNT, CANCELLED, F_STATUS_SIZE = range(6)


class Status:
    """Where a message came from, its tag, its size, and the error code of the operation."""

    def __init__(self, status: Status | None = None) -> None:
        if not (status is None or isinstance(status, Status)):
            raise TypeError(f"expected a Status, got {type(status).__name__}")
        fields = status._fields if status else (ANY_SOURCE, ANY_TAG, SUCCESS, 0, 0)
        self._fields: array[int] = array("q", fields)

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, Status) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it may change

    def __reduce__(self) -> Any:
        return type(self).f2py, (self.py2f(),)

    def Get_source(self) -> int:
        """Return the rank that sent the message."""
        return self._fields[F_SOURCE]

    @integral
    def Set_source(self, source: int) -> None:
        """Set the rank that sent the message."""
        self._fields[F_SOURCE] = source

    def Get_tag(self) -> int:
        """Return the tag."""
        return self._fields[F_TAG]

    @integral
    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self._fields[F_TAG] = tag

    def Get_error(self) -> int:
        """Return the error code."""
        return self._fields[F_ERROR]

    @integral
    def Set_error(self, error: int) -> None:
        """Set the error code."""
        self._fields[F_ERROR] = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Return the number of whole elements, UNDEFINED if there is a part of one."""
        size, count = datatype.Get_size(), self._fields[COUNT]
        if not size:
            return UNDEFINED if count else 0
        return UNDEFINED if count % size else count // size

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements, UNDEFINED if there is a part of one."""
        size, count = datatype.Get_size(), self._fields[COUNT]
        if not size:
            return UNDEFINED if count else 0
        return datatype._named.count_basics(count)

    @integral
    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the number of basic elements."""
        self._fields[COUNT] = datatype._named.size_of_basics(count)

    def Is_cancelled(self) -> bool:
        """Return whether the operation was cancelled."""
        return self._fields[CANCELLED] != 0

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the operation was cancelled."""
        self._fields[CANCELLED] = bool(flag)

    source = property(Get_source, Set_source)
    tag = property(Get_tag, Set_tag)
    error = property(Get_error, Set_error)
    count = property(Get_count, lambda self, count: self.Set_elements(BYTE, count))
    cancelled = property(Is_cancelled, Set_cancelled)

    def tomemory(self) -> memoryview:
        """Return the memory of the status, as integers of 32 bits; the lower half of each field comes first."""
        return memoryview(self._fields).cast("B").cast("i")

    def py2f(self) -> list[int]:
        """Return the fields as a list."""
        return self._fields.tolist()

    @classmethod
    def f2py(cls, arg: list[int]) -> Self:
        """Return the status of a list of fields."""
        status = cls()
        status._fields[:] = array("q", arg)
        return status


def record(status: Status, envelope: Any) -> None:
    """Write source, tag and bytes of a message into a status."""
    fields = status._fields
    fields[F_SOURCE], fields[F_TAG], fields[COUNT] = envelope
    fields[F_ERROR] = fields[CANCELLED] = 0
