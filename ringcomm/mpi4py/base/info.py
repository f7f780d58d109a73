"""Info objects: keys and values, both strings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from ringcomm.mpi4py.base.constants import MAX_INFO_KEY
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_INFO, ERR_INFO_KEY, ERR_INFO_NOKEY, failure
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.base.integers import integral

__all__ = ["INFO_ENV", "INFO_NULL", "Info"]

Items = Mapping[str, str] | Iterable[tuple[str, str]]


class Entries(dict[str, str]):
    """The entries of an info object."""


class Info(Handle):
    """Keys and values, both strings. ringcomm reads none."""

    _object: Entries | None
    _named: Entries
    _null = ERR_INFO, "an info object", "INFO_NULL"

    def __reduce__(self) -> Any:
        if not self or self == INFO_ENV:
            return super().__reduce__()
        return type(self).Create, (self.items(),)

    @classmethod
    def Create(cls, items: Info | Items | None = None) -> Self:
        """Create an info object."""
        info = cls._of(Entries())
        info.update(() if items is None else items)
        return info

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Self:
        """Create an info object with the command and its arguments."""
        command, *rest = [args] if isinstance(args, str) else list(args or ["", ""])
        return cls.Create({key: text for key, text in (("command", command), ("argv", " ".join(rest))) if text})

    def Dup(self) -> Self:
        """Return a copy."""
        return self._of(Entries(self._named))

    def Get(self, key: str) -> str | None:
        """Return the value of a key, None if there is none."""
        return self._named.get(key)

    def Set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        if not 0 < len(key) <= MAX_INFO_KEY:
            raise failure(ERR_INFO_KEY, f"key: expected 1 to {MAX_INFO_KEY} characters, got {key!r}")
        self._named[key] = str(value)

    def Delete(self, key: str) -> None:
        """Remove a key."""
        if self._named.pop(key, None) is None:
            raise failure(ERR_INFO_NOKEY, f"key: expected one of {self.keys()}, got {key!r}")

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self._named)

    @integral
    def Get_nthkey(self, n: int) -> str:
        """Return a key by its number."""
        if not 0 <= n < len(self._named):
            raise failure(ERR_ARG, f"n: expected a number below {len(self._named)}, got {n}")
        return list(self._named)[n]

    # --- As a dictionary; INFO_NULL is an empty one that cannot be changed --------------------------------------------

    @property
    def _dict(self) -> Entries:
        return Entries() if self._object is None else self._object

    def __len__(self) -> int:
        return len(self._dict)

    def __contains__(self, key: str) -> bool:
        return key in self._dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> str:
        return self._dict[key]

    def __setitem__(self, key: str, value: str) -> None:
        if not self:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        del self._dict[key]

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the value of a key, else a default."""
        return self._dict.get(key, default)

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._dict)

    def values(self) -> list[str]:
        """Return the values."""
        return list(self._dict.values())

    def items(self) -> list[tuple[str, str]]:
        """Return the keys with their values."""
        return list(self._dict.items())

    def update(self, items: Info | Items = (), **kwds: str) -> None:
        """Set several keys."""
        if self._object is None:
            raise KeyError("INFO_NULL")
        pairs = items.items() if isinstance(items, (Info, Mapping)) else items
        for key, value in [*pairs, *kwds.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        """Remove a key and return its value, else a default."""
        return self._dict.pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        """Remove the last key and return it with its value."""
        return self._dict.popitem()

    def copy(self) -> Self:
        """Return a copy."""
        return self.Dup() if self else type(self)()

    def clear(self) -> None:
        """Remove all keys."""
        self._dict.clear()


INFO_NULL: Info = constant("INFO_NULL", Info())
INFO_ENV: Info = constant("INFO_ENV", Info.Create_env(sys.argv or None))
