"""What results must be: inputs in closed form, and the plain NumPy loop over the ranks for every dtype and op."""

import ml_dtypes
import numpy as np

from ringcomm import premul_sum
from ringcomm.types import CPU_DTYPES, DTYPES, PremulSum

FACTOR = 0.7  # of premul_sum: has no end in binary
OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", premul_sum(FACTOR))
BITWISE = ("band", "bor", "bxor")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
MOVED_ONLY = tuple(name for name, code in DTYPES.items() if code not in CPU_DTYPES)  # on the CPU


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def legal(name, op):
    """Return whether an operation is defined for a dtype."""
    if name in MOVED_ONLY:
        return False
    if op == "avg":
        return name != "bool"
    if isinstance(op, PremulSum):
        return name in FLOATS + COMPLEX
    if op in BITWISE:
        return name not in FLOATS + COMPLEX
    return name not in COMPLEX or op not in ("min", "max")


COMBINATIONS = [(name, op) for name in DTYPES for op in OPS if legal(name, op)]
REFUSED = [(name, op) for name in DTYPES for op in OPS if not legal(name, op)]


def filled(rank, shape, name, salt=0):
    """Return the array of a rank: integers of all sizes, so that sums wrap; fractions of which sums are rounded."""
    dtype = numpy_dtype(name)
    count = int(np.prod(shape)) * (2 if name in COMPLEX else 1)
    start = np.uint64(rank * 0x10001 + salt * 0x1000003 + 1)
    mixed = (np.arange(count, dtype=np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)  # multiples of the golden ratio
    if name == "bool":
        values = (mixed >> np.uint64(63)).astype(bool)
    elif dtype.kind in "iu" or name in MOVED_ONLY:
        values = (mixed >> np.uint64(64 - 8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    else:  # from -4 to 4 with all bits that float64 has
        real = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-50 - 4.0
        values = real.astype(parts_dtype(dtype)).view(dtype)
    return values.reshape(shape)


def special(rank, name):
    """Return an array in which, over three ranks, every special value is combined with all others."""
    finfo = ml_dtypes.finfo(parts_dtype(numpy_dtype(name)))
    tiny = float(finfo.smallest_subnormal)
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, float(finfo.max), tiny, -3 * tiny, float(finfo.tiny)]
    n = len(values)
    chosen = np.array(values)[np.arange(n**3) // n**rank % n]
    return chosen.astype(finfo.dtype).view(numpy_dtype(name))


def parts_dtype(dtype):
    """Return the dtype of real and imaginary parts, for other dtypes the dtype itself."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def reduced(inputs, op):
    """Combine the arrays of all ranks in rank order, in the accumulation type, and round once."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    with np.errstate(all="ignore"):
        if dtype.kind == "c" and op == "prod":
            total = inputs[0]
            for x in inputs[1:]:
                total = complex_product(total, x)
            return total
        parts = [x.reshape(-1).view(parts_dtype(dtype)) for x in inputs]
        if dtype.name in ("float16", "bfloat16"):
            parts = [x.astype(np.float32) for x in parts]
        if isinstance(op, PremulSum):
            parts = [x * x.dtype.type(op.factor) for x in parts]
        total = parts[0]
        for x in parts[1:]:
            total = COMBINE[op if isinstance(op, str) else "sum"](total, x)
        if op == "avg":
            total = divided(total, len(inputs))
        return total.astype(parts_dtype(dtype)).view(dtype).reshape(shape)


def divided(total, size):
    """Return the quotient in the dtype of the array; that of integers is truncated."""
    if total.dtype.kind not in "iu":
        return total / total.dtype.type(size)
    quotients = [abs(int(x)) // size * (1 if x >= 0 else -1) for x in total.flat]
    return np.array(quotients, total.dtype).reshape(total.shape)


COMBINE = {
    "sum": np.add,  # of bool: or
    "avg": np.add,
    "prod": np.multiply,  # of bool: and
    # np.minimum and np.maximum, but with a defined choice for +0 and -0: the later one.
    "min": lambda a, b: np.where(a != a, a, np.where(a < b, a, b)),
    "max": lambda a, b: np.where(a != a, a, np.where(a > b, a, b)),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def complex_product(x, y):
    """Multiply by the definition: NumPy's own product fuses multiplications and additions."""
    result = np.empty_like(x)
    result.real = x.real * y.real - x.imag * y.imag
    result.imag = x.real * y.imag + x.imag * y.real
    return result


def bits(x):
    """Return the bytes of an array, in which every NaN is the same NaN."""
    x = np.asarray(x)
    if x.dtype.name not in FLOATS + COMPLEX:
        return x.tobytes()
    parts = x.flatten().view(parts_dtype(x.dtype))
    parts[parts != parts] = np.nan
    return parts.tobytes()


def assert_same(got, expected, what=""):
    """Fail unless both have the same dtype, shape and bits."""
    got, expected = np.asarray(got), np.asarray(expected)
    kinds = [f"{x.dtype} {x.shape}" for x in (got, expected)]
    assert kinds[0] == kinds[1], f"{what}: {kinds[0]} instead of {kinds[1]}"
    if bits(got) == bits(expected):
        return
    pairs = list(zip(got.flat, expected.flat, strict=True))
    wrong = [i for i, (a, b) in enumerate(pairs) if bits(a) != bits(b)]
    first = f"the first at {wrong[0]} is {pairs[wrong[0]][0]!r} instead of {pairs[wrong[0]][1]!r}"
    raise AssertionError(f"{what}: {len(wrong)} of {len(pairs)} elements of {kinds[0]} are wrong, {first}")
