"""Handles: names for objects of the library. Copies of a handle are equal; a null handle is false."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from ringcomm.mpi4py.base.errors import failure

__all__ = ["Handle", "constant"]

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by what `handle` returns
_constants: dict[str, Handle] = {}  # by the name under which pickle finds them


class Handle:
    """The base of communicators, requests and messages. Classes directly below it do not compare with each other."""

    _object: Any = None  # what the handle names; the class has that of the null handle
    _family: ClassVar[tuple[type[Handle]]]  # the class directly below Handle, in a tuple: a class without itself
    _null: ClassVar[tuple[int, str, str]]  # of the family: the class of its errors, what a handle names, a null handle

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Handle in cls.__bases__:
            cls._family = (cls,)

    def __new__(cls, other: Handle | None = None) -> Self:
        """Make a null handle, or a copy of another one."""
        if other is not None and not isinstance(other, cls._family):
            raise TypeError(f"expected {cls._family[0].__name__}, got {type(other).__name__}")
        self = super().__new__(cls)
        if other:
            cls._check_kind(other._object)
            self._object = other._object
        return self

    @classmethod
    def _check_kind(cls, named: Any) -> None:
        """Raise TypeError if this class is no class for the object."""

    @classmethod
    def _of(cls, named: Any) -> Self:
        """Return a handle for an object."""
        self = object.__new__(cls)
        self._object = named
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._family):
            return NotImplemented
        return self._object is other._object

    __hash__ = None  # type: ignore[assignment]  # equal handles may become null one by one

    def __bool__(self) -> bool:
        return self._object is not self._family[0]._object

    def __reduce__(self) -> Any:
        for name, known in _constants.items():
            if self is known:
                return name
        for known in _constants.values():
            if self == known:
                return type(self), (known,)
        raise ValueError(f"cannot pickle {type(self).__name__}: it is no constant")

    @property
    def _named(self) -> Any:
        """The object; raises the error of a null handle."""
        if self._object is None:
            code, expected, got = self._null
            raise failure(code, f"expected {expected}, got {got}")
        return self._object

    @property
    def _is_constant(self) -> bool:
        return any(self is known for known in _constants.values())

    @property
    def _is_predefined(self) -> bool:
        return self._is_constant

    def _nullify(self) -> None:
        with suppress(AttributeError):  # it is null
            del self._object

    def free(self) -> None:
        """Free the object, unless the handle is null or a constant. Of a predefined one, free only the handle."""
        if self and not self._is_predefined:
            self.Free()
        elif not self._is_constant:
            self._nullify()

    def Free(self) -> None:
        """Free the object. The handle becomes null."""
        self._named  # noqa: B018 (raises if the handle is null)
        if self._is_predefined:
            code, expected, _ = self._null
            raise failure(code, f"expected {expected} that the program has made, got a predefined one")
        self._nullify()

    @property
    def handle(self) -> int:
        """A number from which `fromhandle` makes an equal handle; 0 for a null one."""
        if not self:
            return 0
        _objects[id(self._object)] = self._object
        return id(self._object)

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """Make a handle from the number of an existing one."""
        if handle and handle not in _objects:
            raise ValueError(f"expected the number of an existing {cls.__name__}, got {handle}")
        return cls._of(_objects[handle]) if handle else cls()

    def toint(self) -> int:
        """Return the number of the handle; see `handle`."""
        return self.handle

    @classmethod
    def fromint(cls, arg: int) -> Self:
        """Make a handle from the number of an existing one."""
        return cls.fromhandle(arg)

    py2f = toint
    f2py = fromint


def constant(name: str, handle: Any) -> Any:
    """Name a handle that pickle finds under this name, and that cannot be freed."""
    _constants[name] = handle
    return handle
