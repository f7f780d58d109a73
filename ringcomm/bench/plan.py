"""What to measure: the options of `ringcomm bench`, checked before anything starts."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf

from ringcomm import ArgumentError
from ringcomm.bench.machine import cache_bytes
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS, dtype_named
from ringcomm.machine import memory
from ringcomm.types import DTYPES

__all__ = [
    "COPY_BYTES",
    "BenchCase",
    "BenchPlan",
    "parse_bytes",
    "parse_dtypes",
    "parse_ops",
    "parse_ranks",
    "positive",
    "whole",
]

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RANK_BYTES = 100 << 20  # about what a Python process with its libraries needs
MOST_RANKS = 1024  # that ringcomm starts at once
UNDEFINED = {  # operation → kinds of dtypes, in NumPy's letters
    **dict.fromkeys(("band", "bor", "bxor"), "fcV"),
    **dict.fromkeys(("min", "max"), "c"),
    "avg": "biu",
}
GPU_POOL = 256 << 20  # twice the last-level cache of a GPU of 2025
COPY_BYTES = 256 << 20  # of the memcpy beside the results: larger than the caches


@dataclass(frozen=True)
class BenchCase:
    """One thing to measure: `count` elements in a block, `bytes` in the larger of input and output."""

    collective: str
    dtype: str
    op: str
    count: int
    bytes: int


@dataclass(kw_only=True)
class BenchPlan:
    collectives: list[str]
    ranks: list[int]
    begin: int  # bytes of the larger of input and output, as nccl-tests counts
    end: int = 0  # 0: the default of the device
    factor: int = 4
    rounds: int = 20
    warmups: int = 20
    check: bool = True
    dtypes: list[str]
    ops: list[str]
    root: int = 0
    in_place: bool = True
    symmetric: bool = False
    asynchronous: bool = False
    device: str = "host"

    def __post_init__(self) -> None:
        known = [*COLLECTIVES, "all"]
        for name in self.collectives:
            if name not in known:
                raise ArgumentError(f"unknown collective {name!r}; known: {', '.join(known)}")
        self.collectives = list(COLLECTIVES if "all" in self.collectives else dict.fromkeys(self.collectives))
        self.end = self.end or (64 << 10 if self.device == "emulated" else 256 << 20)

    @property
    def pool(self) -> int:
        """Bytes that the buffers of a rank rotate through: twice the last-level cache."""
        return GPU_POOL if self.device == "cuda" else 2 * cache_bytes()

    def runs_in_place(self, collective: str) -> bool:
        row = COLLECTIVES[collective]
        return row.in_place and (self.in_place or not row.out_of_place)

    def cases(self, ranks: int) -> list[BenchCase]:
        """Return everything to measure, each once. Dtypes and operations to compare are neighbors."""
        found = []
        for collective in self.collectives:
            row = COLLECTIVES[collective]
            blocks, ops = row.blocks(ranks), self.ops if row.reduces else self.ops[:1]
            if not blocks:
                found.append(BenchCase(collective, self.dtypes[0], ops[0], 0, 0))
                continue
            for size, dtype in product(self.sizes(), self.dtypes):
                item = dtype_named(dtype).itemsize
                count = max(1, size // blocks // item)
                found += [BenchCase(collective, dtype, op, count, count * blocks * item) for op in ops]
        return list(dict.fromkeys(found))

    def sizes(self) -> Iterator[int]:
        size = self.begin
        while size <= self.end:
            yield size
            size *= self.factor

    def require(self, libraries: int) -> None:
        """Refuse what this many libraries cannot measure, before anything starts."""
        if self.begin > self.end:
            raise ArgumentError(f"sizes: expected -b <= -e, got {self.begin} > {self.end} bytes")
        if any(COLLECTIVES[name].reduces for name in self.collectives):
            for dtype, op in product(self.dtypes, self.ops):
                if dtype_named(dtype).kind in UNDEFINED.get(op, ""):
                    raise ArgumentError(f"{op} of {dtype} is not defined")
        rooted = [name for name, row in COLLECTIVES.items() if row.rooted]
        if self.root and not set(rooted) & set(self.collectives):
            chosen = ", ".join(self.collectives)
            raise ArgumentError(f"--root: expected a collective with a root ({', '.join(rooted)}), got {chosen}")
        for ranks in self.ranks:
            if ranks > MOST_RANKS:
                raise ArgumentError(f"--ranks: expected at most {MOST_RANKS}, got {ranks}")
            if self.root >= ranks:
                raise ArgumentError(f"--root: expected 0 to {ranks - 1} with {ranks} ranks, got {self.root}")
            arrays = 1 if all(map(self.runs_in_place, self.collectives)) else 2
            each = RANK_BYTES + arrays * max(self.pool, self.end)
            what = f"{ranks} ranks of {libraries} libraries (smaller: -e, --ranks, --vs)"
            memory.require(ranks * (libraries * each + 2 * COPY_BYTES), what)


def whole(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers from `minimum` on."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return number


def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive number")


def parse_bytes(text: str) -> int:
    """Parse 64, 64K, 64M or 64G."""
    number, suffix = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if suffix not in SUFFIXES or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 4, 64K, 16M or 1G")
    return int(number) * SUFFIXES[suffix]


def parse_ranks(text: str) -> list[int]:
    """Parse 2 or 2,4,8."""
    with suppress(ValueError):
        found = [int(word) for word in text.split(",")]
        if min(found) >= 1:
            return list(dict.fromkeys(found))
    raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks such as 2 or 2,4,8")


def parse_dtypes(text: str) -> list[str]:
    """Parse float32 or float32,float16."""
    names = _parse_names("dtype", text, DTYPES)
    for name in names:
        try:
            dtype_named(name)
        except TypeError:
            raise argparse.ArgumentTypeError(f"{name} needs: pip install ml_dtypes") from None
    return names


def parse_ops(text: str) -> list[str]:
    """Parse sum or sum,max."""
    return _parse_names("operation", text, REDUCTIONS)


def _parse_names(what: str, text: str, known: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return names
