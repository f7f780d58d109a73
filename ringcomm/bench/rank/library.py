"""What a library must offer to be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .collectives import Array, Setting

__all__ = ["Library"]


class Library(Protocol):
    """One rank of a library that is measured. A module with `start(folder) -> Library` is one; `folder` is empty, and
    the same for all ranks.
    """

    rank: int
    size: int
    versions: dict[str, str]

    def symmetric(self, size: int) -> Array | None:
        """Return `size` bytes of memory that the other ranks access directly, if the library has such."""
        ...

    def call(
        self, collective: str, setting: Setting, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array | None]:
        """Return the call, and where its result will be. No `out`: in place, in x.

        In place where x and the result differ in size, `x` is a block of `out` or the other way round.
        """
        ...

    def barrier(self) -> object: ...

    def close(self) -> None: ...
