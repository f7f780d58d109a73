"""The tables: every dtype, operation and collective, and its code in ringcomm.h. A new one is a row here."""

from dataclasses import dataclass

from ringcomm.errors import ArgumentError, refuse, unknown

__all__ = ["COLLECTIVES", "DTYPES", "OPS", "REDUCING", "ROOTED", "WHOLE", "PremulSum", "premul_sum", "reduction"]


def _numbered(*names: str) -> dict[str, int]:
    return {name: code for code, name in enumerate(names)}


# Named as NumPy (with ml_dtypes) and PyTorch name them; the order is that of `enum rc_dtype`.
DTYPES = _numbered(
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)

COLLECTIVES = _numbered(
    *("barrier", "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter"),
    *("all_to_all", "split", "empty"),
)
WHOLE = ("broadcast", "reduce", "all_reduce")  # of the others the count is that of a block of one rank
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")

_OP_CODES = _numbered("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")


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
    """Return OPS[op], or refuse what is no operation, also where it cannot be a key."""
    try:
        return OPS[op]
    except TypeError:
        raise unknown("op", op, _OP_CODES) from None
