"""The interface of a library to measure, and the memory of its arrays."""

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from .collectives import Array, RankCase

__all__ = ["HostBuffers", "Library"]


class HostBuffers:
    """NumPy arrays; other memory has arrays with NumPy's interface."""

    def __init__(self) -> None:
        self.versions = {"numpy": np.__version__}

    def memory(self, size: int, huge: bool) -> Any:
        """Return initialized bytes in huge or small pages, as a NumPy array of that size would have."""
        region = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(region, np.uint8)
        array[:] = 1  # untouched memory is one shared page of zeros, always in the cache
        return array

    def read(self, array: Any) -> Array:
        """Return the values in host memory: the array itself if it is there."""
        values: Array = array
        return values

    def write(self, array: Any, values: Array) -> None:
        """Write back the values that `read` returned."""

    def finish(self) -> None:
        """Wait for all queued calls."""


class Library(Protocol):
    """One rank of a library. Its module has `start(folder, device) -> Library`: `folder` is empty and the same for all
    ranks, or "" if the launcher of the bench has started them; `device` is that of the arrays. Those of `LAUNCHED`
    also take the seconds for all ranks to connect.
    """

    rank: int
    size: int
    buffers: HostBuffers
    versions: dict[str, str]
    barrier: Callable[[], object]

    def memory(self, kind: str, size: int) -> Array | None:  # noqa: ARG002 (of those that override it)
        """Return `size` initialized bytes of "symmetric" or "shared" memory, or None if the library has none."""
        return None

    def call(
        self, collective: str, case: RankCase, x: Array, out: Array | None, asynchronous: bool
    ) -> tuple[Callable[[], object], Array | None]:
        """Return the call and the array of its result. Without `out`, x is also the result; where input and result
        differ in size, in place means that one is a block of the other.
        """
        ...

    def close(self) -> None: ...
