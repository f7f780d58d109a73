"""Attributes: values that a program attaches to communicators and datatypes, with functions to copy and delete them."""

import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ringcomm.errors import describe_error
from ringcomm.mpi4py.base import errors
from ringcomm.mpi4py.base.constants import KEYVAL_INVALID

__all__ = ["Attributes", "call_user_function"]


class _Keyval(NamedTuple):
    copy: Any  # a function, True (copy the value itself), or false (copy nothing)
    delete: Callable[..., object] | None
    nopython: bool


_keyvals: dict[int, _Keyval] = {}
_numbers = itertools.count(1000)


class Attributes:
    """The methods of a class whose objects have attributes, in the dictionary `_attributes`."""

    _attributes: dict[int, tuple[_Keyval, Any]]

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[[Any, int, Any], Any] | bool | None = None,
        delete_fn: Callable[[Any, int, Any], None] | None = None,
        nopython: bool = False,
    ) -> int:
        """Create a key. `copy_fn(obj, keyval, value)` runs in Dup, `delete_fn` in Delete_attr and Free."""
        keyval = next(_numbers)
        _keyvals[keyval] = _Keyval(copy_fn, delete_fn, nopython)
        return keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key. Attributes that have it keep their functions. Returns KEYVAL_INVALID."""
        _known(keyval)
        del _keyvals[keyval]
        return KEYVAL_INVALID

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of an attribute, None if there is none."""
        if keyval not in self._attributes:
            _known(keyval)
            return None
        return self._attributes[keyval][1]

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set an attribute. The one that it replaces is deleted."""
        known = _known(keyval)
        if known.nopython and not isinstance(attrval, int):
            raise TypeError(f"attribute {keyval}: expected an integer, got {type(attrval).__name__}")
        if keyval in self._attributes:
            self.Delete_attr(keyval)
        self._attributes[keyval] = known, attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete an attribute, by the function of its key."""
        if keyval not in self._attributes:
            _known(keyval)
            return
        known, value = self._attributes.pop(keyval)
        if known.delete:
            call_user_function(known.delete, self, keyval, value)

    def _copy_attributes(self, copy: "Attributes") -> None:
        """Copy the attributes, as their keys say, to a duplicate of this object."""
        for keyval, (known, value) in list(self._attributes.items()):
            if callable(known.copy):
                value = call_user_function(known.copy, self, keyval, value)
            if known.copy and value is not NotImplemented:
                copy._attributes[keyval] = known, value

    def _delete_attributes(self) -> None:
        for keyval in list(self._attributes):
            self.Delete_attr(keyval)


def call_user_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that MPI would call. Its exception is printed, and becomes one of MPI."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        code = error.Get_error_code() if isinstance(error, errors.Exception) else errors.ERR_OTHER
        raise errors.failure(
            code, f"{getattr(function, '__qualname__', function)} raised {describe_error(error)}"
        ) from error


def _known(keyval: int) -> _Keyval:
    if keyval not in _keyvals:
        raise errors.failure(errors.ERR_KEYVAL, f"expected a number of Create_keyval, got {keyval}")
    return _keyvals[keyval]
