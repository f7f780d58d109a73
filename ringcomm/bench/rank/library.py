"""The interface of a library to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .collectives import Array, RankCase

__all__ = ["Library", "LibraryBuffers"]


class LibraryBuffers(Protocol):
    """The memory of the arrays, which have NumPy's interface, and the access of the bench to it."""

    versions: dict[str, str]

    def memory(self, size: int, huge: bool) -> Any:
        """Return initialized bytes; `huge`: back host memory with huge pages."""
        ...

    def read(self, array: Any) -> Array:
        """Return the values in host memory: the array itself if it is there."""
        ...

    def write(self, array: Any, values: Array) -> None:
        """Write back the values that `read` returned."""
        ...

    def finish(self) -> None:
        """Wait for all queued calls."""
        ...


class Library(Protocol):
    """One rank of a library. Its module has `start(folder, device) -> Library`: `folder` is empty and the same for all
    ranks, `device` that of the arrays.
    """

    rank: int
    size: int
    buffers: LibraryBuffers
    versions: dict[str, str]
    barrier: Callable[[], object]

    def symmetric(self, size: int) -> Array | None:  # noqa: ARG002 (of those that override it)
        """Return `size` bytes of a symmetric buffer, or None if the library has none."""
        return None

    def call(
        self, collective: str, case: RankCase, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array | None]:
        """Return the call and the array of its result. Without `out`, x is also the result; where input and result
        differ in size, in place means that one is a block of the other.
        """
        ...

    def close(self) -> None: ...
