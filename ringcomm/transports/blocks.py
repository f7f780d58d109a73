"""Collectives as an exchange of blocks: what each rank sends to every other, and how it uses the received blocks."""

import itertools
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.algorithms.schedule import even
from ringcomm.errors import MismatchError
from ringcomm.native import check, ffi, lib
from ringcomm.transports.contract import CollectiveCall
from ringcomm.types import COLLECTIVES, DTYPES, WHOLE

__all__ = ["KINDS", "Blockwise", "Bytes", "Exchange", "Signature", "Steps", "view"]

Bytes = NDArray[np.uint8]
Steps = Generator[None, None, None]  # of a call: yields while it has to wait
Exchange = Callable[[int, list[Bytes]], Generator[None, None, list[Bytes]]]  # blocks to each rank → blocks from each
KINDS = list(DTYPES)
DESCRIPTION_BYTES = 256  # more than any call needs
NOTHING = np.empty(0, np.uint8)
ONE_EXCHANGE = 64 << 10  # bytes up to which every rank of an all_reduce sends its whole array to every other


def view(pointer: Any, count: int, dtype: int) -> Bytes:
    """Return the memory of an array as bytes, in an object of its own: one for source and target means in place."""
    size = count * lib.rc_dtype_bytes(dtype)
    return np.frombuffer(ffi.buffer(pointer, size), np.uint8) if size else np.empty(0, np.uint8)


class Signature(NamedTuple):
    """A call as it must be the same on all ranks: its description, and the counts that this leaves out."""

    text: str
    counts: str = ""

    @property
    def collective(self) -> str:
        return self.text.partition("(")[0]


@lru_cache(maxsize=1024)
def signature_of(
    name: str, dtype: int, sizes: int | tuple[int, ...] | None, op: int, factor: float, root: int
) -> Signature:
    """Return the signature of a call; `sizes` are None where only pairs of ranks know them."""
    count = sizes if isinstance(sizes, int) else sum(sizes or ())
    text = ffi.new("char[]", DESCRIPTION_BYTES)
    with_counts = not isinstance(sizes, int)
    check(lib.rc_describe(COLLECTIVES[name].code, count, dtype, op, factor, root, with_counts, text, len(text)))
    description = str(ffi.string(text), "ascii")
    return Signature(description, f"{list(sizes)}, {factor}" if isinstance(sizes, tuple) else "")


class Blockwise:
    """A collective on its arrays: the blocks to send to each rank, and the use of those received, by types.def."""

    def __init__(self, rank: int, size: int, name: str, call: CollectiveCall) -> None:
        n, me = size, rank
        self.name, self.n, self.me = name, n, me
        self.source, self.target, count, dtype, op, factor, root, counts = call
        self.dtype, self.op, self.factor, self.root = dtype, op, factor, root
        self.item = lib.rc_dtype_bytes(dtype) if name != "barrier" else 1
        whole = name in WHOLE
        rows = [count] * n if counts == ffi.NULL else [counts[rank] for rank in range(n)]
        self.recv_rows = rows
        if name == "all_to_all" and counts != ffi.NULL:
            self.recv_rows = [counts[n + rank] for rank in range(n)]
        self.rows = [0] * n if name == "barrier" else rows
        self.joined = sum(rows) if not whole else count
        self.count = count if whole else rows[me]
        sizes = self.count if counts == ffi.NULL else None if name == "all_to_all" else tuple(rows)
        self.signature = signature_of(name, dtype, sizes, op, factor, root)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of elements in the source and in the target of this rank."""
        row, is_root = COLLECTIVES[self.name], self.me == self.root
        source_count = self.joined if row.given == "BLOCKS" else self.count
        target_count = sum(self.recv_rows) if row.got == "BLOCKS" else self.count
        if not is_root:
            if row.given_by == "ROOT" and row.given != row.got:  # not broadcast, which receives into the same array
                source_count = 0
            target_count = 0 if row.got_by == "ROOT" else target_count
        return source_count, target_count

    def memory(self) -> tuple[Bytes, Bytes]:
        """Return source and target of this rank as bytes: the same array if the result replaces the input."""
        source_count, target_count = self.counts()
        source = self._read(source_count)
        in_place = self.source == self.target and source_count == target_count
        return source, source if in_place else self._write(target_count)

    def run(self, exchange: Exchange) -> Steps:
        """Send each rank what it needs, and place or reduce what arrives."""
        row, is_root = COLLECTIVES[self.name], self.me == self.root
        source_count, target_count = self.counts()
        data = self._read(source_count)
        if self.name == "all_reduce" and data.size > ONE_EXCHANGE:
            rows = list(even(self.count, self.n))
            mine = self._reduced((yield from exchange(0, self._blocks(data, rows))))
            self._place((yield from exchange(1, [mine] * self.n)), rows)
            return
        if row.given_by == "ROOT" and not is_root:
            blocks = [NOTHING] * self.n
        elif row.given == "BLOCKS":
            blocks = self._blocks(data, self.rows)
        else:
            blocks = [data if row.got_by == "ALL" or rank == self.root else NOTHING for rank in range(self.n)]
        got = yield from exchange(0, blocks)
        receives = not is_root if self.name == "broadcast" else is_root or row.got_by == "ALL"
        if not receives:
            return
        if row.reduces:
            self._write(target_count)[:] = self._reduced(got)
        elif row.given_by == "ROOT":
            self._write(target_count)[:] = got[self.root]
        else:
            if row.given == "BLOCKS":  # an all_to_all in place: this block may lie where another belongs
                got[self.me] = got[self.me].copy()
            self._place(got, self.recv_rows)

    def _read(self, count: int) -> Bytes:
        return view(self.source, count, self.dtype)

    def _write(self, count: int) -> Bytes:
        return view(self.target, count, self.dtype)

    def _blocks(self, data: Bytes, rows: list[int]) -> list[Bytes]:
        ends = np.cumsum([0, *rows]) * self.item
        return [data[begin:end] for begin, end in itertools.pairwise(ends.tolist())]

    def _reduced(self, inputs: list[Bytes]) -> Bytes:
        """Return the inputs, reduced in rank order."""
        out = np.empty(inputs[0].size, np.uint8)
        pointers = ffi.new("void *[]", [ffi.from_buffer(each) for each in inputs])
        result = ffi.from_buffer(out)
        check(lib.rc_reduce(result, pointers, len(inputs), out.size // self.item, self.dtype, self.op, self.factor))
        return out

    def _place(self, got: list[Bytes], rows: list[int]) -> None:
        blocks = self._blocks(self._write(sum(rows)), rows)
        for rank, (block, here) in enumerate(zip(blocks, got, strict=True)):
            if len(here) != len(block):  # before any write
                sent, expected = len(here) // self.item, len(block) // self.item
                text = f"rank {rank} sends {sent} elements to rank {self.me}, which expects {expected}"
                raise MismatchError(text, rank=rank, collective=self.name, expected=expected, got=sent)
        for block, here in zip(blocks, got, strict=True):
            block[:] = here
