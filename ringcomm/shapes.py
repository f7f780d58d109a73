"""Shapes of results: of joined blocks, of a rank's share of an array, of a new array."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

import numpy as np

from ringcomm.errors import integer, refuse
from ringcomm.native import NULL, ffi
from ringcomm.types import CollectiveSpec

__all__ = ["Shapes", "check_shape"]

Shape = tuple[int, ...]
MAX_AXES = 64  # of NumPy
MAX_BYTES = 2**100  # more is refused here; less reaches the check of memory, whose error has figures


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of results on this rank, from the shape of its array and from counts, the rows of each rank."""

    rank: int
    size: int

    def result(self, row: CollectiveSpec, shape: Shape, counts: Any) -> tuple[Shape, int, Any]:
        """Return the shape of what is got for an array of `shape`, and count and counts of the call for C."""
        if row.given == "BLOCK":
            joined, blocks = self.joined(shape, counts)
            return joined, prod(shape), blocks
        if row.got == "BLOCK":
            return self.share(shape, counts)
        if row.given == "ARRAY":
            return shape, prod(shape), NULL
        if counts is None:
            return shape, self.share(shape, None)[1], NULL
        exchanged, blocks = self.exchanged(shape, *counts)
        return exchanged, 0, blocks

    def joined(self, shape: Shape, counts: Sequence[int] | None) -> tuple[Shape, Any]:
        """Return the shape of all ranks' blocks joined, `shape` being this rank's, and their lengths for C."""
        if counts is None:
            return (self.size, *shape), NULL
        rows = self.rows(counts, "counts")
        if shape[:1] != (rows[self.rank],):
            raise refuse(f"rows of the array on rank {self.rank}", rows[self.rank], f"shape {shape}", rank=self.rank)
        return (sum(rows), *shape[1:]), _lengths(rows, shape)

    def share(self, shape: Shape, counts: Sequence[int] | None) -> tuple[Shape, int, Any]:
        """Return the shape and the number of elements of this rank's share of axis 0, and all lengths for C."""
        if not shape:
            raise refuse("array", "an axis to divide among the ranks", "a single element", rank=self.rank)
        if counts is None:
            if shape[0] % self.size:
                expected = f"a multiple of {self.size} rows, or counts"
                raise refuse("axis 0", expected, f"{shape[0]} rows", rank=self.rank)
            share, lengths = shape[0] // self.size, NULL
        else:
            rows = self.rows(counts, "counts", shape)
            share, lengths = rows[self.rank], _lengths(rows, shape)
        return (share, *shape[1:]), share * prod(shape[1:]), lengths

    def exchanged(self, shape: Shape, send: Sequence[int], recv: Sequence[int]) -> tuple[Shape, Any]:
        """Return the shape of the result of an all_to_all of `shape`, and the lengths to send and receive for C."""
        sent, received = self.rows(send, "send_counts", shape), self.rows(recv, "recv_counts")
        return (sum(received), *shape[1:]), _lengths(sent + received, shape)

    def rows(self, counts: Sequence[int], what: str, shape: Shape | None = None) -> list[int]:
        """Check `counts`, one for each rank, and return them; they must add up to the rows of `shape`, if given."""
        try:
            rows = [index(count) for count in counts]
        except TypeError:
            rows = []
        if len(rows) != self.size or any(not 0 <= count < 2**63 for count in rows):
            raise refuse(what, f"{self.size} numbers >= 0", repr(counts), rank=self.rank)
        if shape is not None and shape[:1] != (sum(rows),):
            raise refuse(what, f"the rows of an array of shape {shape}", f"{sum(rows)} rows in all", rank=self.rank)
        return rows


def _lengths(rows: list[int], shape: Shape) -> Any:
    """Return the lengths of blocks for C, from their numbers of rows and the shape of an array with these rows."""
    row = prod(shape[1:])
    try:
        return ffi.new("uint64_t[]", [count * row for count in rows])
    except OverflowError:
        raise refuse("counts", "blocks of fewer than 2**64 elements", f"{rows} rows of {row}") from None


def check_shape(shape: int | Sequence[int], item: int) -> Shape:
    """Check a shape given by the user, of elements of `item` bytes, and return it as a tuple."""
    lengths = shape if np.iterable(shape) else (shape,)
    found = tuple(integer("shape", axis, most=MAX_BYTES) for axis in lengths)
    if any(axis < 0 for axis in found):
        raise refuse("shape", "lengths >= 0", found)
    if len(found) > MAX_AXES:
        raise refuse("shape", f"at most {MAX_AXES} axes", len(found))
    if prod(found) * item > MAX_BYTES:
        raise refuse("shape", "at most 2**100 bytes", found)
    return found
