"""The collectives as an exchange of blocks: what each rank sends to each other, and what it does with what comes."""

import itertools
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import MismatchError
from ringcomm.native import check, ffi, lib
from ringcomm.types import COLLECTIVES, DTYPES, WHOLE

__all__ = ["KINDS", "Blockwise", "Bytes", "Exchange", "Said", "Steps", "view"]

Bytes = NDArray[np.uint8]
Steps = Generator[None, None, None]  # of a call: it yields where it has to wait
Exchange = Callable[[int, list[Bytes]], Generator[None, None, list[Bytes]]]  # a block for each rank → that from each
KINDS = list(DTYPES)
WORDS = 256  # bytes, more than any call needs
NOTHING = np.empty(0, np.uint8)
ONE_EXCHANGE = 64 << 10  # bytes up to which an all_reduce sends everything to everybody


def view(pointer: Any, count: int, dtype: int) -> Bytes:
    """Return the memory of an array as bytes."""
    size = count * lib.rc_dtype_bytes(dtype)
    return np.frombuffer(ffi.buffer(pointer, size), np.uint8) if size else np.empty(0, np.uint8)


class Said(NamedTuple):
    """What a rank calls, as it must be the same on all: in words, and what these leave out."""

    words: str
    counts: str = ""

    @property
    def collective(self) -> str:
        return self.words.partition("(")[0]


@lru_cache(maxsize=1024)
def said(name: str, dtype: int, sizes: int | tuple[int, ...] | None, op: int, factor: float, root: int) -> Said:
    """Say what is called; `sizes` are None where only pairs of ranks know them."""
    count = sizes if isinstance(sizes, int) else sum(sizes or ())
    text = ffi.new("char[]", WORDS)
    with_counts = not isinstance(sizes, int)
    check(lib.rc_describe(COLLECTIVES[name], count, dtype, op, factor, root, with_counts, text, len(text)))
    words = str(ffi.string(text), "ascii")
    return Said(words, f"{list(sizes)}, {factor}" if isinstance(sizes, tuple) else "")


class Blockwise:
    """A collective with its memory: what goes to whom, and what is done with what came."""

    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        source: Any,
        target: Any,
        count: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        counts: Any,
    ) -> None:
        n, me = size, rank
        self.name, self.n, self.me, self.root = name, n, me, root
        self.dtype, self.op, self.factor = dtype, op, factor
        self.item = lib.rc_dtype_bytes(dtype) if name != "barrier" else 1
        whole = name in WHOLE
        rows = [count] * n if counts == ffi.NULL else [counts[rank] for rank in range(n)]
        self.come = rows
        if name == "all_to_all" and counts != ffi.NULL:
            self.come = [counts[n + rank] for rank in range(n)]
        self.rows = [0] * n if name == "barrier" else rows
        self.joined = sum(rows) if not whole else count
        self.count = count if whole else rows[me]
        self.source, self.target = source, target
        sizes = self.count if counts == ffi.NULL else None if name == "all_to_all" else tuple(rows)
        self.said = said(name, dtype, sizes, op, factor, root)

    def counts(self) -> tuple[int, int]:
        """Return how many elements this rank gives, and how many it gets."""
        name, is_root = self.name, self.me == self.root
        gives = self.joined if name in ("scatter", "reduce_scatter", "all_to_all") else self.count
        gets = self.joined if name in ("gather", "all_gather") else self.count
        if name == "all_to_all":
            gets = sum(self.come)
        if not is_root:
            gives = 0 if name == "scatter" else gives
            gets = 0 if name in ("reduce", "gather") else gets
        return gives, gets

    def memory(self) -> tuple[Bytes, Bytes]:
        """Return what this rank gives and what it gets, as bytes: one array where the result replaces the input."""
        gives, gets = self.counts()
        source = self._read(gives)
        return source, source if self.source == self.target and gives == gets else self._write(gets)

    def run(self, exchange: Exchange) -> Steps:
        steps: Steps = getattr(self, f"_{self.name}")(exchange)
        return steps

    def _read(self, count: int) -> Bytes:
        return view(self.source, count, self.dtype)

    def _write(self, count: int) -> Bytes:
        return view(self.target, count, self.dtype)

    def _blocks(self, data: Bytes, rows: list[int]) -> list[Bytes]:
        ends = np.cumsum([0, *rows]) * self.item
        return [data[begin:end] for begin, end in itertools.pairwise(ends.tolist())]

    def _nothing(self) -> list[Bytes]:
        return [np.empty(0, np.uint8)] * self.n

    def _reduced(self, inputs: list[Bytes]) -> Bytes:
        """Return the inputs reduced in rank order."""
        out = np.empty(inputs[0].size, np.uint8)
        pointers = ffi.new("void *[]", [ffi.from_buffer(each) for each in inputs])
        result = ffi.from_buffer(out)
        check(lib.rc_reduce(result, pointers, len(inputs), out.size // self.item, self.dtype, self.op, self.factor))
        return out

    def _place(self, got: list[Bytes], rows: list[int]) -> None:
        blocks = self._blocks(self._write(sum(rows)), rows)
        for rank, (block, here) in enumerate(zip(blocks, got, strict=True)):
            if len(here) != len(block):  # before anything is written
                sent, expected = len(here) // self.item, len(block) // self.item
                text = f"rank {rank} sends {sent} elements to rank {self.me}, which expects {expected}"
                raise MismatchError(text, rank=rank, collective=self.name, expected=expected, got=sent)
        for block, here in zip(blocks, got, strict=True):
            block[:] = here

    def _barrier(self, exchange: Exchange) -> Steps:
        yield from exchange(0, self._nothing())

    def _broadcast(self, exchange: Exchange) -> Steps:
        mine = self._read(self.count) if self.me == self.root else np.empty(0, np.uint8)
        got = yield from exchange(0, [mine] * self.n)
        if self.me != self.root:
            self._write(self.count)[:] = got[self.root]

    def _reduce(self, exchange: Exchange) -> Steps:
        blocks = self._nothing()
        blocks[self.root] = self._read(self.count)
        got = yield from exchange(0, blocks)
        if self.me == self.root:
            self._write(self.count)[:] = self._reduced(got)

    def _all_reduce(self, exchange: Exchange) -> Steps:
        data = self._read(self.count)
        if data.size <= ONE_EXCHANGE:
            self._write(self.count)[:] = self._reduced((yield from exchange(0, [data] * self.n)))
            return
        share = -(-self.count // self.n)
        rows = [max(0, min(share, self.count - rank * share)) for rank in range(self.n)]
        mine = self._reduced((yield from exchange(0, self._blocks(data, rows))))
        self._place((yield from exchange(1, [mine] * self.n)), rows)

    def _gather(self, exchange: Exchange) -> Steps:
        blocks = self._nothing()
        blocks[self.root] = self._read(self.count)
        got = yield from exchange(0, blocks)
        if self.me == self.root:
            self._place(got, self.rows)

    def _all_gather(self, exchange: Exchange) -> Steps:
        self._place((yield from exchange(0, [self._read(self.count)] * self.n)), self.rows)

    def _scatter(self, exchange: Exchange) -> Steps:
        is_root = self.me == self.root
        blocks = self._blocks(self._read(self.joined), self.rows) if is_root else self._nothing()
        self._write(self.count)[:] = (yield from exchange(0, blocks))[self.root]

    def _reduce_scatter(self, exchange: Exchange) -> Steps:
        got = yield from exchange(0, self._blocks(self._read(self.joined), self.rows))
        self._write(self.count)[:] = self._reduced(got)

    def _all_to_all(self, exchange: Exchange) -> Steps:
        got = yield from exchange(0, self._blocks(self._read(self.joined), self.rows))
        self._place([each.copy() for each in got], self.come)
