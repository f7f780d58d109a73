"""What is measured, as the command line asks for it; what makes no sense is refused before anything runs."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf

from ringcomm import ArgumentError, memory
from ringcomm.bench.machine import cache_bytes
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS, dtype_named
from ringcomm.types import DTYPES

__all__ = [
    "COPY_BYTES",
    "Plan",
    "Turn",
    "parse_bytes",
    "parse_collectives",
    "parse_dtypes",
    "parse_ops",
    "positive",
    "whole",
]

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RANK_BYTES = 100 << 20  # what a process of Python with its libraries takes, about
MOST_RANKS = 1024  # of one start of ringcomm
SENSELESS = {  # operation → kinds of dtypes, as NumPy calls them
    **dict.fromkeys(("band", "bor", "bxor"), "fcV"),
    **dict.fromkeys(("min", "max"), "c"),
    "avg": "biu",
}
GPU_POOL = 256 << 20  # twice the last-level cache of a GPU of 2025
COPY_BYTES = 256 << 20  # of the memcpy that is the limit: larger than the caches


@dataclass(frozen=True)
class Turn:
    """One thing to measure: `count` elements in a block, `bytes` in the larger of input and output."""

    collective: str
    dtype: str
    op: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    collectives: list[str]
    ranks: list[int]
    begin: int  # bytes of the larger of input and output, as nccl-tests counts
    end: int
    factor: int
    rounds: int
    warmups: int
    check: bool
    dtypes: list[str]
    ops: list[str]
    root: int
    in_place: bool
    rotate: bool
    symmetric: bool
    asynchronous: bool
    device: str = "host"

    @property
    def pool(self) -> int:
        """Bytes that the buffers rotate through: twice the last-level cache, on every rank."""
        if not self.rotate:
            return 0
        return GPU_POOL if self.device == "cuda" else 2 * cache_bytes()

    def places(self, collective: str) -> bool:
        """Say whether this collective is done in place."""
        row = COLLECTIVES[collective]
        return row.in_place and (self.in_place or not row.out_of_place)

    def turns(self, ranks: int) -> list["Turn"]:
        """Return everything to measure, each once; what is to be compared follows one another."""
        found = []
        for collective in self.collectives:
            row = COLLECTIVES[collective]
            blocks, ops = row.blocks(ranks), self.ops if row.reduces else self.ops[:1]
            if not blocks:
                found.append(Turn(collective, self.dtypes[0], ops[0], 0, 0))
                continue
            for size in self.sizes():
                for dtype in self.dtypes:
                    item = dtype_named(dtype).itemsize
                    count = max(1, size // blocks // item)
                    found += [Turn(collective, dtype, op, count, count * blocks * item) for op in ops]
        return list(dict.fromkeys(found))

    def sizes(self) -> Iterator[int]:
        size = self.begin
        while size <= self.end:
            yield size
            size *= self.factor

    def require(self, libraries: int) -> None:
        """Refuse what cannot be measured, with this many libraries, before anything is started."""
        if self.begin > self.end:
            raise ArgumentError(f"sizes: expected -b <= -e, got {self.begin} > {self.end} bytes")
        if any(COLLECTIVES[name].reduces for name in self.collectives):
            for dtype, op in product(self.dtypes, self.ops):
                if dtype_named(dtype).kind in SENSELESS.get(op, ""):
                    raise ArgumentError(f"{op} of {dtype} makes no sense")
        rooted = [name for name, row in COLLECTIVES.items() if row.rooted]
        if self.root and not set(rooted) & set(self.collectives):
            chosen = ", ".join(self.collectives)
            raise ArgumentError(f"--root: expected a collective with a root ({', '.join(rooted)}), got {chosen}")
        for ranks in self.ranks:
            if ranks > MOST_RANKS:
                raise ArgumentError(f"--ranks: expected at most {MOST_RANKS}, got {ranks}")
            if self.root >= ranks:
                raise ArgumentError(f"--root: expected 0 to {ranks - 1} with {ranks} ranks, got {self.root}")
            arrays = 1 if all(map(self.places, self.collectives)) else 2
            each = RANK_BYTES + arrays * max(self.pool, self.end)
            what = f"{ranks} ranks of {libraries} libraries (smaller: -e, --ranks, --vs)"
            memory.require(ranks * (libraries * each + 2 * COPY_BYTES), what)


def whole(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` on."""

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
    """Read 64, 64K, 64M or 64G."""
    number, suffix = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if suffix not in SUFFIXES or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 4, 64K, 16M or 1G")
    return int(number) * SUFFIXES[suffix]


def parse_dtypes(text: str) -> list[str]:
    """Read float32 or float32,float16."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        try:
            dtype_named(name)
        except TypeError:
            raise argparse.ArgumentTypeError(f"{name} needs: pip install ml_dtypes") from None
    return names


def parse_ops(text: str) -> list[str]:
    """Read sum or sum,max."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in REDUCTIONS:
            raise argparse.ArgumentTypeError(f"unknown operation {name!r}; known: {', '.join(REDUCTIONS)}")
    return names


def parse_collectives(words: list[str]) -> list[str]:
    """Read the names on the command line; "all" stands for every one."""
    for word in words:
        if word not in COLLECTIVES and word != "all":
            raise ArgumentError(f"unknown collective {word!r}; known: {', '.join(COLLECTIVES)}, all")
    return list(COLLECTIVES) if "all" in words else list(dict.fromkeys(words))
