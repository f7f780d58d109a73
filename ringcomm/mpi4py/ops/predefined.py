"""The predefined operations of reductions."""

from typing import Any

import numpy as np

from ringcomm.mpi4py.base.handles import constant
from ringcomm.mpi4py.ops.op import Array, Op, Operation

__all__ = [
    *("BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR", "MAX", "MAXLOC", "MIN", "MINLOC", "NO_OP", "PROD"),
    *("REPLACE", "SUM"),
]


def _located(x: Any, y: Any, first: bool) -> Any:
    """Return the pair whose value comes first; of equal values, that with the lower index."""
    (u, i), (v, j) = x, y
    if u == v:
        return (v, j) if j < i else (u, i)
    return (u, i) if first else (v, j)


def _located_arrays(x: Array, y: Array, first: Any) -> Array:
    lower = (x["value"] == y["value"]) & (y["index"] < x["index"])
    return np.where(first(y["value"], x["value"]) | lower, y, x)


def _predefine(name: str, call: Any, arrays: Any, kinds: str, commutative: bool = True) -> Op:
    handle: Op = constant(name, Op._of(Operation(name, call, arrays, kinds, commutative)))
    return handle


MAX = _predefine("MAX", lambda x, y: y if y > x else x, np.maximum, "biuf")
MIN = _predefine("MIN", lambda x, y: y if y < x else x, np.minimum, "biuf")
SUM = _predefine("SUM", lambda x, y: x + y, np.add, "biufc")
PROD = _predefine("PROD", lambda x, y: x * y, np.multiply, "biufc")
LAND = _predefine("LAND", lambda x, y: bool(x) & bool(y), np.logical_and, "biu")
BAND = _predefine("BAND", lambda x, y: x & y, np.bitwise_and, "biu")
LOR = _predefine("LOR", lambda x, y: bool(x) | bool(y), np.logical_or, "biu")
BOR = _predefine("BOR", lambda x, y: x | y, np.bitwise_or, "biu")
LXOR = _predefine("LXOR", lambda x, y: bool(x) ^ bool(y), np.logical_xor, "biu")
BXOR = _predefine("BXOR", lambda x, y: x ^ y, np.bitwise_xor, "biu")
MAXLOC = _predefine(
    "MAXLOC", lambda x, y: _located(x, y, x[0] > y[0]), lambda x, y: _located_arrays(x, y, np.greater), "V"
)
MINLOC = _predefine(
    "MINLOC", lambda x, y: _located(x, y, x[0] < y[0]), lambda x, y: _located_arrays(x, y, np.less), "V"
)
REPLACE = _predefine("REPLACE", lambda x, y: y, lambda x, y: y, "biufcV", False)
NO_OP = _predefine("NO_OP", lambda x, y: x, lambda x, y: x, "biufcV", False)
