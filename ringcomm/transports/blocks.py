"""Collectives as an exchange of blocks: how many elements each rank gives and gets, by types.def."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringcomm.native import check, ffi, lib
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import COLLECTIVES

__all__ = ["Blockwise", "Bytes", "describe"]

Bytes = NDArray[np.uint8]
DESCRIPTION_BYTES = 256  # more than any call needs


@lru_cache(maxsize=1024)
def describe(name: str, dtype: int, sizes: int | tuple[int, ...] | None, op: int, factor: float, root: int) -> str:
    """Describe a call as the core does; `sizes` are None where only pairs of ranks know them."""
    count = sizes if isinstance(sizes, int) else sum(sizes or ())
    text = ffi.new("char[]", DESCRIPTION_BYTES)
    with_counts = not isinstance(sizes, int)
    check(lib.rc_describe(COLLECTIVES[name].code, count, dtype, op, factor, root, with_counts, text, len(text)))
    return str(ffi.string(text), "ascii")


class Blockwise:
    """A collective, and the lengths of its arrays and blocks."""

    def __init__(self, rank: int, size: int, name: str, call: CollectiveCall) -> None:
        n, me, row = size, rank, COLLECTIVES[name]
        self.name, self.n, self.me = name, n, me
        self.source, self.target, count, dtype, op, factor, root, counts, _ = call
        self.dtype, self.op, self.factor, self.root = dtype, op, factor, root
        self.item = lib.rc_dtype_bytes(dtype) if row.moves_data else 1
        whole, by_pairs = row.given == "ARRAY", row.exchanges and counts != ffi.NULL
        rows = [count] * n if counts == ffi.NULL else [counts[rank] for rank in range(n)]
        self.recv_rows = rows
        if by_pairs:
            self.recv_rows = [counts[n + rank] for rank in range(n)]
        self.rows = rows if row.moves_data else [0] * n
        self.joined = sum(rows) if not whole else count
        self.count = count if whole else rows[me]
        sizes = self.count if counts == ffi.NULL else None if by_pairs else tuple(rows)
        self.description = describe(name, dtype, sizes, op, factor, root)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of elements in the source and in the target of this rank."""
        row = COLLECTIVES[self.name]
        given = self.joined if row.given == "BLOCKS" else self.count
        got = sum(self.recv_rows) if row.got == "BLOCKS" else self.count
        gives = row.gives(self.me, self.root) or row.in_place  # a broadcast receives into the same array
        return given * gives, got * row.gets(self.me, self.root)
