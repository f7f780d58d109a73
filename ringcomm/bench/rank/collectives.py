"""The table of benchmarks: for each collective its blocks, its bus factor and the expected result, for any library."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["COLLECTIVES", "REDUCTIONS", "Array", "Collective", "RankCase", "count_wrong", "dtype_named", "fill"]

Array = npt.NDArray[Any]

# Inputs repeat after a prime number of elements, so that a displaced block is detected.
PERIOD = 251
# Small enough for exact sums in every accumulation type; different on up to 61 ranks.
LEVELS = 61

REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True)
class RankCase:
    """A case as one rank sees it; `count` is the number of elements in a block."""

    rank: int
    size: int
    count: int
    dtype: np.dtype[Any]
    op: str
    root: int
    in_place: bool = True

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size

    def wave(self, rank: int, block: int = 0) -> Array:
        """Return the first PERIOD elements of a block of the input of `rank`, which the rest repeats."""
        position = (block * self.count + np.arange(PERIOD)) % PERIOD
        value = (position + rank) % LEVELS
        if self.op == "prod":
            value = 1 + value % 2
        return value.astype(self.dtype)

    def reduced(self, block: int = 0) -> Array:
        """Return the reduction of all ranks' waves, in rank order, rounded once."""
        values = np.stack([self.wave(rank, block) for rank in range(self.size)]).astype(self.accumulator)
        result = REDUCTIONS[self.op].reduce(values, axis=0)
        if self.op == "avg" and self.dtype.kind in "iu":
            result = np.trunc(result.astype(self.dtype) / self.size)  # of a sum that may wrap
        elif self.op == "avg":
            result = (result / self.size).astype(self.accumulator)
        return np.asarray(result, self.dtype)

    @property
    def accumulator(self) -> np.dtype[Any]:
        if self.dtype.kind in "biu":
            return np.dtype(np.int64)
        return np.dtype(np.float32) if self.dtype.itemsize <= 2 else self.dtype


@dataclass(frozen=True)
class Collective:
    """A row. The bus factor is a function of the number of ranks, as in nccl-tests."""

    expected: Callable[[RankCase], list[Array]]  # the blocks of this rank's result
    bus_factor: Callable[[int], float]
    all_sent: bool = False  # the input has a block for each rank
    all_received: bool = False  # the result has
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    out_of_place: bool = True
    empty: bool = False  # nothing is sent

    def sends(self, size: int) -> int:
        """Return the number of blocks of the input."""
        return 0 if self.empty else size if self.all_sent else 1

    def receives(self, size: int) -> int:
        """Return the number of blocks of the result."""
        return 0 if self.empty else size if self.all_received else 1

    def blocks(self, size: int) -> int:
        return max(self.sends(size), self.receives(size))


def count_wrong(array: Array, expected: list[Array]) -> int:
    """Count the elements of `array` that differ from `expected`, block by block."""
    if not expected:
        return 0
    wrong = 0
    for block, wave in zip(array.reshape(len(expected), -1), expected, strict=True):
        whole = block[: block.size // PERIOD * PERIOD].reshape(-1, PERIOD)
        rest = block[whole.size :]
        wrong += int(np.count_nonzero(whole != wave) + np.count_nonzero(rest != wave[: rest.size]))
    return wrong


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype; importing ml_dtypes registers bfloat16 and float8."""
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401 (for its dtypes)
    return np.dtype(name)


def fill(array: Array, case: RankCase) -> None:
    """Write this rank's input into the contiguous `array`."""
    wave = case.wave(case.rank)
    flat = array.reshape(-1)
    whole = flat[: flat.size // PERIOD * PERIOD].reshape(-1, PERIOD)
    whole[:] = wave
    flat[whole.size :] = wave[: flat.size - whole.size]


def at_root(case: RankCase, blocks: list[Array]) -> list[Array]:
    return blocks if case.rank == case.root else []


def every(s: RankCase, block: int = 0) -> list[Array]:
    return [s.wave(rank, block) for rank in range(s.size)]


def share(size: int) -> float:
    return (size - 1) / size


def one(_: int) -> float:
    return 1


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(lambda s: [s.reduced()], lambda size: 2 * share(size), reduces=True),
    "reduce_scatter": Collective(lambda s: [s.reduced(s.rank)], share, all_sent=True, reduces=True),
    "all_gather": Collective(every, share, all_received=True),
    "broadcast": Collective(lambda s: [s.wave(s.root)], one, out_of_place=False, rooted=True),
    "reduce": Collective(lambda s: at_root(s, [s.reduced()]), one, reduces=True, rooted=True),
    "gather": Collective(lambda s: at_root(s, every(s)), share, all_received=True, rooted=True),
    "scatter": Collective(lambda s: [s.wave(s.root, s.rank)], share, all_sent=True, rooted=True),
    "all_to_all": Collective(lambda s: every(s, s.rank), share, all_sent=True, all_received=True, in_place=False),
    "send_recv": Collective(lambda s: [s.wave(s.left)], one, in_place=False),
    "barrier": Collective(lambda s: [], lambda size: 0, empty=True, out_of_place=False),
}
