"""Errors: the exception of MPI, the error classes, and the translation of ringcomm's errors."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ringcomm.errors import Aborted, ArgumentError, MemoryShortage, MismatchError, PeerLost, RingcommError
from ringcomm.mpi4py.base.integers import integral

SUCCESS = 0
ERR_BUFFER, ERR_COUNT, ERR_TYPE, ERR_TAG, ERR_COMM, ERR_RANK, ERR_REQUEST, ERR_ROOT, ERR_GROUP, ERR_OP = range(1, 11)
ERR_TOPOLOGY, ERR_DIMS, ERR_ARG, ERR_UNKNOWN, ERR_TRUNCATE, ERR_OTHER, ERR_INTERN, ERR_IN_STATUS = range(11, 19)
ERR_PENDING, ERR_ACCESS, ERR_AMODE, ERR_ASSERT, ERR_BAD_FILE, ERR_BASE, ERR_CONVERSION, ERR_DISP = range(19, 27)
ERR_DUP_DATAREP, ERR_FILE_EXISTS, ERR_FILE_IN_USE, ERR_FILE, ERR_INFO_KEY, ERR_INFO_NOKEY = range(27, 33)
ERR_INFO_VALUE, ERR_INFO, ERR_IO, ERR_KEYVAL, ERR_LOCKTYPE, ERR_NAME, ERR_NO_MEM, ERR_NOT_SAME = range(33, 41)
ERR_NO_SPACE, ERR_NO_SUCH_FILE, ERR_PORT, ERR_QUOTA, ERR_READ_ONLY, ERR_RMA_CONFLICT, ERR_RMA_SYNC = range(41, 48)
ERR_SERVICE, ERR_SIZE, ERR_SPAWN, ERR_UNSUPPORTED_DATAREP, ERR_UNSUPPORTED_OPERATION, ERR_WIN = range(48, 54)
ERR_RMA_RANGE, ERR_RMA_ATTACH, ERR_RMA_FLAVOR, ERR_RMA_SHARED, ERR_SESSION, ERR_ERRHANDLER = range(54, 60)
ERR_VALUE_TOO_LARGE, ERR_PROC_ABORTED, ERR_ABI, ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = range(60, 66)
ERR_LASTCODE = 92

_texts: dict[int, str] = {
    value: f"MPI_{name}" for name, value in globals().items() if name == "SUCCESS" or name.startswith("ERR_")
}
_classes = {code: code for code in _texts}  # code → class; a class is a code of its own
_added: list[int] = []  # the codes and classes that the program has added
_numbers = itertools.count(ERR_LASTCODE + 1)

# The argument that ringcomm refuses → the error class.
_REFUSED = {"array": ERR_BUFFER, "out": ERR_BUFFER, "dtype": ERR_TYPE, "op": ERR_OP, "tag": ERR_TAG}
_REFUSED |= {"root": ERR_ROOT, "peer": ERR_RANK, "dest": ERR_RANK, "source": ERR_RANK, "counts": ERR_COUNT}


@functools.total_ordering
class Exception(RuntimeError):
    """An error of MPI: compares with numbers as its error code does."""

    _text = ""  # what happened, after the name of the class
    handled = False  # whether an error handler was asked
    args: tuple[int]

    @integral
    def __init__(self, ierr: int = SUCCESS, /) -> None:
        super().__init__(ERR_UNKNOWN if ierr < SUCCESS else int(ierr))

    def __int__(self) -> int:
        return self.args[0]

    def __bool__(self) -> bool:
        return int(self) != SUCCESS

    def __hash__(self) -> int:
        return hash(int(self))

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __lt__(self, other: Any) -> bool:
        return int(self) < int(other)

    def __repr__(self) -> str:
        return f"MPI.Exception({int(self)})"

    def __str__(self) -> str:
        return self.Get_error_string()

    def Get_error_code(self) -> int:
        """Return the error code."""
        return int(self)

    def Get_error_class(self) -> int:
        """Return the error class."""
        return _classes.get(int(self), ERR_UNKNOWN)

    def Get_error_string(self) -> str:
        """Return the name of the error class, and what happened."""
        name = _texts.get(int(self), f"error code {int(self)}")
        return f"{name}: {self._text}" if self._text else name

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


def failure(code: int, text: str = "") -> Exception:
    """Return the exception of an error class, with what happened."""
    error = Exception(code)
    error._text = text
    return error


def translate(error: RingcommError) -> Exception:
    """Return the exception of MPI for an error of ringcomm, with its text."""
    if isinstance(error, ArgumentError):
        return failure(_REFUSED.get(error.argument or "", ERR_ARG), str(error))
    if isinstance(error, MismatchError):  # of one rank's call: a message that is too long
        return failure(ERR_OTHER if error.peer is None else ERR_TRUNCATE, str(error))
    kinds = {PeerLost: ERR_PROC_FAILED, Aborted: ERR_PROC_ABORTED, MemoryShortage: ERR_NO_MEM}
    return failure(kinds.get(type(error), ERR_OTHER), str(error))


FAILURES = (RingcommError, Exception)  # what a call on a communicator raises, before its error handler is asked

Call = TypeVar("Call", bound=Callable[..., Any])


def handled(call: Call) -> Call:
    """Make the error handler of a communicator handle the errors of a method.

    Plain calls, which take less than a microsecond, do without: what fails in their fast path is handled there.
    """
    call = integral(call)

    @functools.wraps(call)
    def handling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except FAILURES as error:
            self._object.fail(error)

    return cast(Call, handling)


# --- Codes ------------------------------------------------------------------------------------------------------------


@integral
def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    return _classes[_known(errorcode)]


@integral
def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code or class."""
    return _texts.get(_known(errorcode), "")


def Add_error_class() -> int:
    """Add an error class."""
    code = next(_numbers)
    _classes[code] = code
    _added.append(code)
    return code


def Add_error_code(errorclass: int) -> int:
    """Add an error code to a class."""
    code = Add_error_class()
    _classes[code] = _known(errorclass)
    return code


def Add_error_string(errorcode: int, string: str) -> None:
    """Set the text of an error code or class that the program has added."""
    _texts[_own(errorcode)] = string


def Remove_error_class(errorclass: int) -> None:
    """Remove an error class that the program has added, and that has no codes and no text."""
    if _own(errorclass) in [cls for code, cls in _classes.items() if code != errorclass]:
        raise failure(ERR_OTHER, f"error class {errorclass} has codes")
    Remove_error_code(errorclass)


def Remove_error_code(errorcode: int) -> None:
    """Remove an error code that the program has added, and that has no text."""
    if _own(errorcode) in _texts:
        raise failure(ERR_OTHER, f"error code {errorcode} has a text")
    del _classes[errorcode]
    _added.remove(errorcode)


def Remove_error_string(errorcode: int) -> None:
    """Remove the text of an error code or class that the program has added."""
    _texts.pop(_own(errorcode), None)


def last_used_code() -> int:
    """Return the value of the attribute LASTUSEDCODE."""
    return max(_added, default=ERR_LASTCODE)


def _known(code: int) -> int:
    if code not in _classes:
        raise failure(ERR_ARG, f"unknown error code {code}")
    return code


def _own(code: int) -> int:
    if code not in _added:
        raise failure(ERR_ARG, f"{code} is no error code or class that the program has added")
    return code


__all__ = [
    *(name for name in globals() if name.startswith(("ERR_", "SUCCESS"))),
    *("Add_error_class", "Add_error_code", "Add_error_string", "Exception", "Get_error_class"),
    *("Get_error_string", "Remove_error_class", "Remove_error_code", "Remove_error_string"),
]
