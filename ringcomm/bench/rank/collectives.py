"""The table of benchmarks: a collective is a row that says how much moves and what must come out, whoever moves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["COLLECTIVES", "REDUCTIONS", "Array", "Collective", "Setting", "count_wrong", "dtype_named", "fill"]

Array = npt.NDArray[Any]

# Inputs repeat after a prime number of elements, so that no block can lie at the wrong place unnoticed.
PERIOD = 251
# Small enough for sums that every accumulation type holds exactly, and different on up to 61 ranks.
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
class Setting:
    """One measurement as one rank sees it; `count` is the number of elements in a block."""

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
        """Return the first PERIOD elements of a block of the input of `rank`; the rest repeats them."""
        position = (block * self.count + np.arange(PERIOD)) % PERIOD
        value = (position + rank) % LEVELS
        if self.op == "prod":
            value = 1 + value % 2
        return value.astype(self.dtype)

    def reduced(self, block: int = 0) -> Array:
        """Return what the ranks' waves make together: in rank order, rounded once."""
        values = np.stack([self.wave(rank, block) for rank in range(self.size)]).astype(self.accumulator)
        result = REDUCTIONS[self.op].reduce(values, axis=0)
        if self.op == "avg":
            result = (result / self.size).astype(self.accumulator)
        return np.asarray(result, self.dtype)

    @property
    def accumulator(self) -> np.dtype[Any]:
        if self.dtype.kind in "biu":
            return np.dtype(np.int64)
        return np.dtype(np.float32) if self.dtype.itemsize <= 2 else self.dtype


def one(_: int) -> int:
    return 1


def each(size: int) -> int:
    return size


@dataclass(frozen=True)
class Collective:
    """A row. The numbers of blocks and the bus factor are functions of the number of ranks, as in nccl-tests."""

    expected: Callable[[Setting], list[Array]]  # the blocks that this rank receives
    bus_factor: Callable[[int], float]
    sends: Callable[[int], int] = one
    receives: Callable[[int], int] = one
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    out_of_place: bool = True

    def blocks(self, size: int) -> int:
        return max(self.sends(size), self.receives(size))


def count_wrong(array: Array, expected: list[Array]) -> int:
    """Count the elements of `array` that are not as `expected`, block by block."""
    if not expected:
        return 0
    wrong = 0
    for block, wave in zip(array.reshape(len(expected), -1), expected, strict=True):
        whole = block[: block.size // PERIOD * PERIOD].reshape(-1, PERIOD)
        rest = block[whole.size :]
        wrong += int(np.count_nonzero(whole != wave) + np.count_nonzero(rest != wave[: rest.size]))
    return wrong


def dtype_named(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; it knows bfloat16 and the float8s once ml_dtypes is imported."""
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401
    return np.dtype(name)


def fill(array: Array, setting: Setting) -> None:
    """Write this rank's input into the contiguous `array`."""
    wave = setting.wave(setting.rank)
    flat = array.reshape(-1)
    whole = flat[: flat.size // PERIOD * PERIOD].reshape(-1, PERIOD)
    whole[:] = wave
    flat[whole.size :] = wave[: flat.size - whole.size]


def at_root(setting: Setting, blocks: list[Array]) -> list[Array]:
    return blocks if setting.rank == setting.root else []


def share(size: int) -> float:
    return (size - 1) / size


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        lambda s: [s.reduced()],
        bus_factor=lambda size: 2 * share(size),
        reduces=True,
    ),
    "reduce_scatter": Collective(
        lambda s: [s.reduced(block=s.rank)],
        bus_factor=share,
        sends=each,
        reduces=True,
    ),
    "all_gather": Collective(
        lambda s: [s.wave(rank) for rank in range(s.size)],
        bus_factor=share,
        receives=each,
    ),
    "broadcast": Collective(
        lambda s: [s.wave(s.root)],
        bus_factor=lambda size: 1,
        rooted=True,
        out_of_place=False,
    ),
    "reduce": Collective(
        lambda s: at_root(s, [s.reduced()]),
        bus_factor=lambda size: 1,
        reduces=True,
        rooted=True,
    ),
    "gather": Collective(
        lambda s: at_root(s, [s.wave(rank) for rank in range(s.size)]),
        bus_factor=share,
        receives=each,
        rooted=True,
    ),
    "scatter": Collective(
        lambda s: [s.wave(s.root, block=s.rank)],
        bus_factor=share,
        sends=each,
        rooted=True,
    ),
    "all_to_all": Collective(
        lambda s: [s.wave(rank, block=s.rank) for rank in range(s.size)],
        bus_factor=share,
        sends=each,
        receives=each,
        in_place=False,
    ),
    "send_recv": Collective(
        lambda s: [s.wave(s.left)],
        bus_factor=lambda size: 1,
        in_place=False,
    ),
    "barrier": Collective(
        lambda s: [],
        bus_factor=lambda size: 0,
        sends=lambda size: 0,
        receives=lambda size: 0,
        out_of_place=False,
    ),
}
