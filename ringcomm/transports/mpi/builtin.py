"""MPI's own collectives: `Config(algorithm="mpi")`, to compare with, and to choose."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.transports.blocks import Blockwise, Bytes
from ringcomm.types import DTYPES, OPS

__all__ = ["refuse_unsupported", "start"]

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
OPERATIONS = {OPS[name][0]: name.upper() for name in ("sum", "prod", "min", "max", "band", "bor", "bxor")}
LOGICAL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}


def refuse_unsupported(dtype: int) -> None:
    """Refuse a dtype that MPI cannot reduce."""
    if dtype not in TYPES:
        name = list(DTYPES)[dtype]
        raise ArgumentError(f"MPI cannot reduce {name}; it can {', '.join(list(DTYPES)[known] for known in TYPES)}")


def start(comm: Any, mpi: Any, call: Blockwise, source: Bytes, target: Bytes, op: int) -> Any:
    """Start a collective and return its request. Source and target are one array, or do not overlap."""
    sizes, incoming = ([count * call.item for count in counts] for counts in (call.rows, call.recv_rows))
    in_place = source is target
    match call.name:
        case "broadcast":
            return comm.Ibcast((target, mpi.BYTE), call.root)
        case "all_gather":
            return comm.Iallgatherv((source, mpi.BYTE), _blocks(target, sizes, mpi))
        case "gather":
            return comm.Igatherv((source, mpi.BYTE), _blocks(target, sizes, mpi), call.root)
        case "scatter":
            return comm.Iscatterv(_blocks(source, sizes, mpi), (target, mpi.BYTE), call.root)
        case "all_to_all":
            given = mpi.IN_PLACE if in_place else _blocks(source, sizes, mpi)
            return comm.Ialltoallv(given, _blocks(target, incoming, mpi))
    name, dtype = OPERATIONS[op], getattr(mpi, TYPES[call.dtype])
    operation = getattr(mpi, LOGICAL[name] if call.dtype == DTYPES["bool"] else name)
    given = mpi.IN_PLACE if in_place else (source, source.size // call.item, dtype)
    result = target, target.size // call.item, dtype
    match call.name:
        case "all_reduce":
            return comm.Iallreduce(given, result, operation)
        case "reduce":
            return comm.Ireduce(given, result, operation, call.root)
        case _:  # reduce_scatter
            return comm.Ireduce_scatter(given, result, call.rows, operation)


def _blocks(data: Bytes, sizes: Sequence[int], mpi: Any) -> Any:
    """Return an array as blocks of these bytes; None on a rank that takes no part."""
    begins = [0, *accumulate(sizes)][:-1]
    return (data, sizes, begins, mpi.BYTE) if data.size or not sum(sizes) else None
