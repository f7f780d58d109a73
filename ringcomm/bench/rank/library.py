"""What a library must offer to be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .collectives import Array, Setting

__all__ = ["Buffers", "Library"]


class Buffers(Protocol):
    """Where the arrays that a library moves lie, and how the bench gets at them. They look like NumPy's."""

    versions: dict[str, str]

    def memory(self, size: int, huge: bool) -> Any:
        """Return bytes that have been written to, from `huge` pages or small ones where that makes a difference."""
        ...

    def read(self, array: Any) -> Array:
        """Return the values in host memory: the array itself, if it lies there."""
        ...

    def write(self, array: Any, values: Array) -> None:
        """Write back what `read` has returned."""
        ...

    def finish(self) -> None:
        """Return when all that was called is done, where calls are only queued."""
        ...


class Library(Protocol):
    """One rank of a library that is measured. A module with `start(folder, device) -> Library` is one; `folder` is
    empty, and the same for all ranks; `device` is where the arrays are to be.
    """

    rank: int
    size: int
    buffers: Buffers
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
