"""A chunk of a collective on blocks: the i-th part of every block, as types.def gives and gets them."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ringcomm.native import NULL, ffi
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.contract import CollectiveCall
from ringcomm.types import COLLECTIVES

__all__ = ["Chunk", "chunk_of"]

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
    row, is_root, item = COLLECTIVES[blocks.name], blocks.me == blocks.root, blocks.item

    def part(length: int) -> tuple[int, int]:
        return i * length // number, (i + 1) * length // number

    def copies(data: str, by: str, rows: Sequence[int], array: int) -> list[Copy]:
        if by == "ROOT" and not is_root:
            return []
        lengths = rows if data == "BLOCKS" else [blocks.count]
        found, size = [], 0
        for length, end in zip(lengths, accumulate(lengths), strict=True):
            first, last = part(length)
            if last > first:
                found.append((array + (end - length + first) * item, size, (last - first) * item))
                size += found[-1][2]
        return found

    def placed(found: list[Copy], base: int) -> list[Copy]:
        return [(array, base + offset, size) for array, offset, size in found]

    given = copies(row.given, row.given_by, blocks.rows, call.source)
    got = copies(row.got, row.got_by, blocks.recv_rows, call.target)
    given_bytes, got_bytes = (sum(size for *_, size in found) for found in (given, got))
    source_count, target_count = blocks.counts()
    if call.source == call.target and source_count == target_count:  # in place, as also broadcast is
        source = target = memory_to_get(max(given_bytes, got_bytes))
        if row.given_by == "ROOT" and is_root:
            got, got_bytes = [], 0  # the root has it
    else:
        source, target = memory_to_give(given_bytes), memory_to_get(got_bytes)
    begin, end = part(blocks.count)
    on_host = call._replace(source=ffi.cast("void *", source), target=ffi.cast("void *", target), count=end - begin)
    if call.counts != NULL:
        rows = [*blocks.rows, *(blocks.recv_rows if blocks.recv_rows is not blocks.rows else [])]
        parts = [last - first for first, last in map(part, rows)]
        on_host = on_host._replace(counts=ffi.new("uint64_t[]", parts))
    return Chunk(on_host, placed(given, source), placed(got, target), got_bytes)
