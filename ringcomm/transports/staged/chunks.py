"""A chunk of a collective on blocks: the i-th part of every block, as types.def gives and gets them."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ringcomm.native import NULL, ffi
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import COLLECTIVES

__all__ = ["Chunk", "chunk_of"]

Span = tuple[int, int, int]  # in elements: the offset in an array of the call, that in the chunk, the length
Copy = tuple[int, int, int]  # the address in an array of the call, the address in the memory of the chunk, bytes


class Chunk(NamedTuple):
    """A collective on the memory of a chunk, what is copied there before and from there afterwards."""

    call: CollectiveCall
    given: list[Copy]
    got: list[Copy]
    got_bytes: int


def chunk_of(
    blocks: Blockwise,
    call: CollectiveCall,
    i: int,
    number: int,
    memory_to_give: Callable[[int], int],
    memory_to_get: Callable[[int], int],
) -> Chunk:
    """Return the i-th chunk of `number`; the functions return memory for so many bytes."""
    row, item, part = COLLECTIVES[blocks.name], blocks.item, _Part(i, number)
    given = _spans(part, _lengths(blocks, row.given, row.given_by, blocks.rows))
    got = _spans(part, _lengths(blocks, row.got, row.got_by, blocks.recv_rows))
    given_bytes, got_bytes = (item * sum(length for *_, length in spans) for spans in (given, got))
    source_count, target_count = blocks.counts()
    if call.source == call.target and source_count == target_count:  # in place, as also broadcast is
        source = target = memory_to_get(max(given_bytes, got_bytes))
        if row.given_by == "ROOT" and blocks.me == blocks.root:
            got, got_bytes = [], 0  # the root has it
    else:
        source, target = memory_to_give(given_bytes), memory_to_get(got_bytes)
    on_cpu = call._replace(
        source=ffi.cast("void *", source), target=ffi.cast("void *", target), count=part.length(blocks.count)
    )
    if call.counts != NULL:
        rows = [*blocks.rows, *(blocks.recv_rows if blocks.recv_rows is not blocks.rows else [])]
        on_cpu = on_cpu._replace(counts=ffi.new("uint64_t[]", [*map(part.length, rows)]))
    return Chunk(on_cpu, _copies(given, call.source, source, item), _copies(got, call.target, target, item), got_bytes)


class _Part(NamedTuple):
    """The i-th of `number` parts of a block of any length."""

    i: int
    number: int

    def begin(self, length: int) -> int:
        return self.i * length // self.number

    def length(self, length: int) -> int:
        return (self.i + 1) * length // self.number - self.begin(length)


def _lengths(blocks: Blockwise, data: str, by: str, rows: Sequence[int]) -> Sequence[int]:
    """Return the lengths of the blocks that this rank gives or gets."""
    if by == "ROOT" and blocks.me != blocks.root:
        return []
    return rows if data == "BLOCKS" else [blocks.count]


def _spans(part: _Part, lengths: Sequence[int]) -> list[Span]:
    """Return the parts of blocks that lie one after the other, as do their parts in a chunk."""
    spans, at = [], 0
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        if taken := part.length(length):
            spans.append((end - length + part.begin(length), at, taken))
            at += taken
    return spans


def _copies(spans: Sequence[Span], array: int, chunk: int, item: int) -> list[Copy]:
    return [(array + first * item, chunk + at * item, length * item) for first, at, length in spans]
