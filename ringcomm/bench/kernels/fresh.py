"""Check the kernels with fresh inputs before every launch, made and compared on the device.

A kernel that does nothing, or that finds the data of the launch before in a staging buffer, passes a check of constant
inputs. Here every input, and so every result, changes from launch to launch; outputs hold the complement of what is
expected before the launch, and the elements beside them a pattern that must stay.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcomm.bench.kernels.device_arrays import DeviceArrays
from ringcomm.bench.rank.collectives import COLLECTIVES, LEVELS, PERIOD, Array, RankCase, dtype_named
from ringcomm.transports.cuda.virtual import VirtualRanks
from ringcomm.types import DTYPES, OPS

__all__ = ["Found", "FreshCheck", "VirtualCase"]

EDGE = 64  # elements before and behind an array
STEP = 97  # by which the inputs move on, prime to PERIOD
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}  # by the bytes of an element
SMALL = {"bool": 2, "bfloat16": 256, "float16": 2048}  # the integers up to here are exact, or all values


@dataclass(frozen=True)
class VirtualCase:
    """A collective of `size` virtual ranks; `count` is the number of elements in a block."""

    collective: str
    size: int
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    kernel: str = ""  # "": the one for this size
    offset: int = 0  # elements by which the arrays are displaced from an aligned address
    symmetric: bool = False


@dataclass
class Found:
    """Elements that were wrong, and elements beside the outputs that were written."""

    wrong: int
    edge: int


class WaveCase(RankCase):
    """A case as one rank sees it, with small values of both signs, whose sums are exact in every dtype and order."""

    def wave(self, rank: int, block: int = 0) -> Array:
        position = (block * self.count + np.arange(PERIOD)) % PERIOD
        name = self.dtype.name
        levels = max(2, min(LEVELS, 2 if "float8" in name else SMALL.get(name, 1 << 20) // self.size))
        value = (position + rank) % levels
        if self.op == "prod":
            return (1 + value % 2).astype(self.dtype)
        if not name.startswith(("uint", "bool")):
            value -= levels // 2
        return (value + 1j * (value % 3) if name.startswith("complex") else value).astype(self.dtype)


class FreshCheck:
    """Launches of one call. `launch` queues all of its work, also in a capture; `found` waits for it."""

    def __init__(self, arrays: DeviceArrays, ranks: VirtualRanks, case: VirtualCase) -> None:
        self.arrays, self.ranks, self.case = arrays, ranks, case
        dtype, row = dtype_named(case.dtype), COLLECTIVES[case.collective]
        self._word = WORDS[dtype.itemsize]
        self._columns = dtype.itemsize // np.dtype(self._word).itemsize
        seen = [
            WaveCase(rank, ranks.size, case.count, dtype, case.op, case.root, in_place=False)
            for rank in range(ranks.size)
        ]
        self._inputs = [self._table([each.wave(each.rank)]) for each in seen]
        self._expected = [self._table(row.expected(each)) for each in seen]
        sends, receives = (case.count * blocks for blocks in (row.sends(ranks.size), row.receives(ranks.size)))
        longest = max(sends, case.count, 1)
        self._positions = arrays.xp.arange(longest, dtype=np.int64) % PERIOD
        self._moved, self._wrong, self._edge = (arrays.zeros(1, np.int64) for _ in range(3))
        only_root = ("reduce", "gather")  # other ranks have no output
        buffers = ranks.symmetric(self._bytes(sends) + self._bytes(receives)) if case.symmetric else []
        self._sources, self._source_edges = self._allocate(sends, buffers, 0)
        self._targets, self._target_edges = self._sources, self._source_edges
        if row.out_of_place and not row.empty:
            self._targets, self._target_edges = self._allocate(receives, buffers, self._bytes(sends))
        sources, targets = ([arrays.address(each) for each in both] for both in (self._sources, self._targets))
        if case.collective in only_root:
            targets = [address if rank == case.root else 0 for rank, address in enumerate(targets)]
        code, factor = OPS[case.op] if row.reduces else (0, 1.0)
        self.call = ranks.call(
            case.collective,
            sources,
            targets,
            case.count,
            DTYPES[case.dtype],
            code,
            factor,
            case.root,
            case.kernel,
            buffers,
        )

    def _bytes(self, elements: int) -> int:
        """Return the size of an array in a symmetric buffer, with its edges."""
        size = (elements + 2 * EDGE) * self._columns * np.dtype(self._word).itemsize
        return -(-size // 128) * 128

    def _table(self, blocks: list[Array]) -> Any:
        """Return one period of each block on the device, as words."""
        made = np.stack(blocks) if blocks else np.zeros((0, PERIOD), self._word)
        words = np.ascontiguousarray(made).view(self._word).reshape(len(made), PERIOD, self._columns)
        return self.arrays.of(words)

    def _allocate(self, elements: int, buffers: Any, at: int) -> tuple[list[Any], list[list[Any]]]:
        """Return an array of each rank, and what lies beside each."""
        arrays, found, edges = self.arrays, [], []
        before = EDGE + self.case.offset
        for rank in range(self.ranks.size):
            words = (elements + 2 * EDGE) * self._columns
            if buffers:
                item = np.dtype(self._word).itemsize
                whole = arrays.device.array(buffers[rank].memory, (at // item + words,), self._word)[at // item :]
                whole = whole.reshape(-1, self._columns)
            else:
                whole = arrays.zeros((elements + 2 * EDGE, self._columns), self._word)
            whole[...] = self._edge_word()
            found.append(whole[before : before + elements])
            edges.append([whole[:before], whole[before + elements :]])
        return found, edges

    def _edge_word(self) -> Any:
        return np.array([0xA5] * 8, np.uint8).view(self._word)[0]

    def launch(self) -> None:
        """Queue new inputs, the call, and the count of what is wrong."""
        arrays, xp = self.arrays, self.arrays.xp
        arrays.settle()
        self._moved += STEP
        index = (self._positions + self._moved) % PERIOD
        here = index[: self.case.count]
        wanted = [xp.take(table, here, axis=1) if len(table) else table for table in self._expected]
        in_place = self._targets is self._sources
        for target, want in zip(self._targets, wanted, strict=True):
            if len(want) and not in_place:
                target[...] = (~want).reshape(target.shape)
        for source, table in zip(self._sources, self._inputs, strict=True):
            source[...] = xp.take(table, index[: len(source)], axis=1)[0]
        self.call.launch(arrays.device.stream())
        arrays.settle()
        for target, want in zip(self._targets, wanted, strict=True):
            if len(want):
                self._wrong += (target != want.reshape(target.shape)).any(axis=1).sum()
        word = self._edge_word()
        for edges in self._target_edges:
            for edge in edges:
                self._edge += (edge != word).sum()

    def found(self) -> Found:
        """Wait for the launches, raise the failure of one, and return what they have found."""
        self.arrays.synchronize()
        self.ranks.check()
        return Found(int(self.arrays.values(self._wrong)[0]), int(self.arrays.values(self._edge)[0]))
