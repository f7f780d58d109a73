"""The tables of types.def: every dtype, operation, collective, path and CUDA kernel, and its code in C."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringcomm.errors import ArgumentError, refuse, unknown

__all__ = [
    *("COLLECTIVES", "CPU_DTYPES", "DTYPES", "KERNELS", "ON_GPUS", "OPS", "PATHS", "PUBLIC", "REASONS", "REDUCING"),
    *("REDUCING_KERNELS", "ROOTED", "TABLES", "WHOLE", "CollectiveSpec", "PremulSum", "premul_sum"),
    *("reducible", "reduction"),
]

TABLES = Path(__file__).with_name("types.def")


class CollectiveSpec(NamedTuple):
    """What a collective takes and returns: a row of types.def."""

    code: int
    given: str
    given_by: str
    got: str
    got_by: str
    kind: str
    moves_as: str  # itself, unless it is internal

    @property
    def reduces(self) -> bool:
        return self.kind == "REDUCES"

    @property
    def moves_data(self) -> bool:
        return self.given != "NOTHING"

    @property
    def exchanges(self) -> bool:
        """Whether blocks move both ways, whose lengths may differ: counts to send, then counts to receive."""
        return self.given == self.got == "BLOCKS"

    @property
    def synchronizes(self) -> bool:
        """Whether no rank ends before all have begun."""
        return self.given_by == self.got_by == "ALL"

    @property
    def rooted(self) -> bool:
        return "ROOT" in (self.given_by, self.got_by)

    @property
    def in_place(self) -> bool:
        """Whether the result may replace the input."""
        return self.given == self.got

    @property
    def starts_in_result(self) -> bool:
        """Whether every rank gets what its input is a part of, so that an algorithm works in the result alone."""
        return self.got_by == "ALL" and self.got in ("ARRAY", "BLOCKS") and self.given in ("ARRAY", "BLOCK")

    def gives(self, rank: int, root: int) -> bool:
        return self.given_by == "ALL" or rank == root

    def gets(self, rank: int, root: int) -> bool:
        return self.got_by == "ALL" or rank == root

    def writes_back(self, rank: int, root: int) -> bool:
        """Whether a call in place writes the array of this rank: not that of a broadcast's root, which has it all."""
        return self.gets(rank, root) and not (self.given_by == "ROOT" and rank == root)


_TABLES: dict[str, list[list[str]]] = {}
for _macro, _row in re.findall(r"^(\w+_ROW)\(([^)]*)\)", TABLES.read_text(), re.MULTILINE):
    _TABLES.setdefault(_macro, []).append(_row.split(", "))

_DTYPES = _TABLES["DTYPE_ROW"]
DTYPES = {name: code for code, (name, *_) in enumerate(_DTYPES)}
CPU_DTYPES = frozenset(DTYPES[name] for name, *_, reduced in _DTYPES if reduced == "CPU_AND_GPU")  # reduced there

COLLECTIVES = {
    name: CollectiveSpec(code, given, given_by, got, got_by, kind, kind[3:].lower() if kind.startswith("AS_") else name)
    for code, (name, _, given, given_by, got, got_by, kind) in enumerate(_TABLES["COLLECTIVE_ROW"])
}
PUBLIC = tuple(name for name, row in COLLECTIVES.items() if row.moves_as == name)  # methods of a Communicator
# Of the others the count is that of a block of one rank.
WHOLE = tuple(name for name, row in COLLECTIVES.items() if row.given == "ARRAY")
REDUCING = tuple(name for name, row in COLLECTIVES.items() if row.reduces)
ROOTED = tuple(name for name, row in COLLECTIVES.items() if row.rooted)

PATHS = tuple(name for name, _ in _TABLES["PATH_ROW"])

_KERNELS = _TABLES["KERNEL_ROW"]
KERNELS = {name: number for number, (name, *_) in enumerate(_KERNELS)}
REDUCING_KERNELS = tuple(name for name, _, collective in _KERNELS if COLLECTIVES[collective.lower()].reduces)
ON_GPUS = frozenset(collective.lower() for *_, collective in _KERNELS)
REASONS = tuple(name for name, _ in _TABLES["REASON_ROW"])

_OP_KINDS = {name: kinds.split(" | ") for name, _, _, kinds in _TABLES["OP_ROW"]}
_OP_CODES = {name: code for code, name in enumerate(_OP_KINDS)}


def reducible(dtype: str, op: str, on_gpu: bool = False) -> bool:
    """Return whether an operation is defined for a dtype, and can be computed there."""
    *_, kind, _, where = _DTYPES[DTYPES[dtype]]
    return kind in _OP_KINDS[op] and (on_gpu or where == "CPU_AND_GPU")


@dataclass(frozen=True, slots=True)
class PremulSum:
    """The operation that multiplies each input by `factor` before it sums them."""

    factor: float


def premul_sum(factor: float) -> PremulSum:
    """Return the operation that sums `factor * x`, computed in the accumulation type; for use as `op`."""
    try:
        return PremulSum(float(factor))
    except (TypeError, ValueError, OverflowError):
        raise refuse("factor", "a number that a float can hold", type(factor).__name__) from None


class _Ops(dict[object, tuple[int, float]]):
    """Operation → (code, factor). The strings are stored, so that the usual call costs one lookup."""

    def __missing__(self, op: object) -> tuple[int, float]:
        if isinstance(op, PremulSum):
            return _OP_CODES["premul_sum"], op.factor
        if op == "premul_sum":
            raise ArgumentError("op 'premul_sum' needs its factor: write op=ringcomm.premul_sum(factor)")
        raise unknown("op", op, _OP_CODES)


OPS = _Ops({name: (code, 1.0) for name, code in _OP_CODES.items() if name != "premul_sum"})


def reduction(op: object) -> tuple[int, float]:
    """Return OPS[op]; raise ArgumentError for any other object, hashable or not."""
    try:
        return OPS[op]
    except TypeError:
        raise unknown("op", op, _OP_CODES) from None
