"""Collectives handed to MPI as they are: `Config(algorithm="mpi")`, to compare, and to choose."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.transports.blocks import Blockwise, Bytes
from ringcomm.types import DTYPES, OPS

__all__ = ["refuse_unknown", "start"]

# Names in mpi4py.MPI.
TYPES = {
    DTYPES[name]: mpi
    for name, mpi in {
        "bool": "C_BOOL",
        "complex64": "C_FLOAT_COMPLEX",
        "complex128": "C_DOUBLE_COMPLEX",
        **{f"int{bits}": f"INT{bits}_T" for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": f"UINT{bits}_T" for bits in (8, 16, 32, 64)},
        "float32": "FLOAT",
        "float64": "DOUBLE",
    }.items()
}
OPERATIONS = {
    OPS[name][0]: mpi
    for name, mpi in {
        "sum": "SUM",
        "prod": "PROD",
        "min": "MIN",
        "max": "MAX",
        "band": "BAND",
        "bor": "BOR",
        "bxor": "BXOR",
    }.items()
}
LOGICAL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}


def refuse_unknown(dtype: int) -> None:
    """Refuse to reduce what MPI cannot."""
    if dtype not in TYPES:
        name = list(DTYPES)[dtype]
        raise ArgumentError(f"MPI cannot reduce {name}; it can {', '.join(list(DTYPES)[known] for known in TYPES)}")


def start(comm: Any, mpi: Any, call: Blockwise, source: Bytes, target: Bytes, op: int) -> Any:
    """Start a collective, and return its request. Source and target are one array, or do not overlap."""
    rows, come = ([count * call.item for count in counts] for counts in (call.rows, call.come))
    in_place = source is target
    match call.name:
        case "broadcast":
            return comm.Ibcast((target, mpi.BYTE), call.root)
        case "all_gather":
            return comm.Iallgatherv((source, mpi.BYTE), _blocks(target, rows, mpi))
        case "gather":
            return comm.Igatherv((source, mpi.BYTE), _blocks(target, rows, mpi), call.root)
        case "scatter":
            return comm.Iscatterv(_blocks(source, rows, mpi), (target, mpi.BYTE), call.root)
        case "all_to_all":
            given = mpi.IN_PLACE if in_place else _blocks(source, rows, mpi)
            return comm.Ialltoallv(given, _blocks(target, come, mpi))
    kind = getattr(mpi, TYPES[call.dtype])
    name = OPERATIONS[op]
    operation = getattr(mpi, LOGICAL[name] if call.dtype == DTYPES["bool"] else name)
    given = mpi.IN_PLACE if in_place else (source, source.size // call.item, kind)
    wanted = target, target.size // call.item, kind
    match call.name:
        case "all_reduce":
            return comm.Iallreduce(given, wanted, operation)
        case "reduce":
            return comm.Ireduce(given, wanted, operation, call.root)
        case _:  # reduce_scatter
            return comm.Ireduce_scatter(given, wanted, call.rows, operation)


def _blocks(data: Bytes, rows: Sequence[int], mpi: Any) -> Any:
    """Return an array as blocks of so many bytes; where there is none, this rank neither gives nor gets any."""
    begins = [0, *accumulate(rows)][:-1]
    return (data, rows, begins, mpi.BYTE) if data.size or not sum(rows) else None
