"""What to measure: the options of `ringcomm bench`, checked before anything starts."""

from dataclasses import dataclass
from itertools import product

from ringcomm import ArgumentError
from ringcomm.bench.machine import cache_bytes
from ringcomm.bench.noise import PERIOD
from ringcomm.bench.rank.collectives import COLLECTIVES, dtype_named
from ringcomm.machine import memory
from ringcomm.options import sizes
from ringcomm.types import reducible

__all__ = ["COPY_BYTES", "BenchCase", "Sweep"]

RANK_BYTES = 100 << 20  # about what a Python process with its libraries needs
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
class Sweep:
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
    shared_arrays: bool = False
    asynchronous: bool = False
    unbound: bool = False
    noise: bool = False
    device: str = "host"

    def __post_init__(self) -> None:
        self.collectives = list(COLLECTIVES if "all" in self.collectives else dict.fromkeys(self.collectives))
        self.end = self.end or (64 << 10 if self.device == "emulated" else 256 << 20)

    @property
    def pool(self) -> int:
        """Bytes that the buffers of a rank rotate through: twice the last-level cache."""
        return GPU_POOL if self.device == "cuda" else 2 * cache_bytes()

    @property
    def memory(self) -> str:
        """The kind of memory of ringcomm's buffers."""
        return "symmetric" if self.symmetric else "shared" if self.shared_arrays else "private"

    @property
    def round_seconds(self) -> float:
        """The least duration of a round: with noise it spans several bursts."""
        return 4 * PERIOD if self.noise else 0.005

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

    def sizes(self) -> list[int]:
        return sizes(self.begin, self.end, self.factor)

    def require(self, libraries: int, here: int | None = None) -> None:
        """Refuse what this many libraries cannot measure, before anything starts; `here` ranks are on this host."""
        self.sizes()  # raises where -b is larger than -e
        rows = [COLLECTIVES[collective] for collective in self.collectives]
        if any(row.reduces for row in rows):
            for dtype, op in product(self.dtypes, self.ops):
                if not reducible(dtype, op, self.device != "host"):
                    raise ArgumentError(f"--op: {op} is not defined for {dtype} in {self.device} memory")
        if self.shared_arrays and self.device != "host":
            raise ArgumentError(f"--shared-arrays: expected --device host, got {self.device}")
        if self.root and not any(row.rooted for row in rows):
            raise ArgumentError(f"--root: expected a rooted collective, got {', '.join(self.collectives)}")
        for ranks in self.ranks:
            if self.root >= ranks:
                raise ArgumentError(f"--root: expected 0 to {ranks - 1} with {ranks} ranks, got {self.root}")
            arrays = 1 if all(map(self.runs_in_place, self.collectives)) else 2
            each = RANK_BYTES + arrays * max(self.pool, self.end)
            of = "1 library" if libraries == 1 else f"{libraries} libraries"
            what = f"a benchmark of {here or ranks} ranks of {of} (smaller: -e, --ranks, --vs)"
            memory.require((here or ranks) * (libraries * each + 2 * COPY_BYTES), what)
