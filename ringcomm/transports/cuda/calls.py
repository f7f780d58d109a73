"""Which CUDA kernel does a collective, and with how many blocks."""

from dataclasses import dataclass
from itertools import accumulate

from ringcomm.devices.contract import Shape
from ringcomm.transports.blocks import Blockwise
from ringcomm.types import DTYPES, OPS, WHOLE

__all__ = ["KERNELS", "REASONS", "Plan", "plan"]


def _numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


# The order is that of `enum Kernel` (kernels.cuh) and of `enum Reason` (call.cuh).
KERNELS = _numbered(
    *("barrier", "ring_all_reduce", "ring_reduce_scatter", "ring_reduce", "one_shot", "two_shot", "ll"),
    *("ring_all_gather", "ring_broadcast", "gather", "scatter", "all_gather", "all_to_all", "message"),
)
REASONS = ("", "not started", "no data", "no room", "mismatch", "aborted")

REDUCING = ("ring_all_reduce", "ring_reduce_scatter", "ring_reduce", "one_shot", "two_shot", "ll")
# A kernel that only moves is compiled once for each size of an element.
MOVED = {1: DTYPES["uint8"], 2: DTYPES["uint16"], 4: DTYPES["uint32"], 8: DTYPES["uint64"], 16: DTYPES["complex128"]}
SUM, _ = OPS["sum"]


@dataclass(slots=True)  # frozen would take a microsecond more to make
class Plan:
    """How a call is launched."""

    kernel: str
    dtype: int  # that the kernel is compiled for
    op: int
    blocks: int
    count: int  # elements of the array, or of a block
    send_rows: list[int] | None  # where blocks begin and end, if they are not equal
    recv_rows: list[int] | None


def plan(call: Blockwise, shape: Shape, kernel: str = "") -> Plan:
    """Choose the kernel for a call, from what is the same on all ranks; or take this one."""
    whole = call.name in WHOLE
    size = (call.count if whole else max(call.rows)) * call.item  # of the array, or of the largest block
    blocks = min(shape.channels, max(1, -(-size // shape.stage_bytes)))
    equal = whole or len({*call.rows}) == 1
    if call.come is not call.rows:  # what only two ranks know
        blocks, equal = shape.channels, False
    kernel = kernel or _kernel(call.name, size, call.n, shape)
    reduces = kernel in REDUCING
    return Plan(
        kernel,
        call.dtype if reduces else MOVED[call.item],
        call.op if reduces else SUM,
        1 if kernel == "ll" else blocks,
        call.count if whole else call.rows[0],
        None if equal else [0, *accumulate(call.rows)],
        None if equal else [0, *accumulate(call.come)],
    )


def _kernel(collective: str, size: int, n: int, shape: Shape) -> str:
    """Few bytes go to everybody at once, many round the ring, where every link carries as little as can be."""
    match collective:
        case "all_reduce":
            if size <= shape.line_bytes:
                return "ll"
            if n * size <= shape.channels * shape.stage_bytes:
                return "one_shot"
            return "two_shot" if size <= 4 * shape.channels * shape.stage_bytes else "ring_all_reduce"
        case "all_gather":
            return "all_gather" if size <= shape.channels * shape.stage_bytes else "ring_all_gather"
        case "broadcast" | "reduce" | "reduce_scatter":
            return f"ring_{collective}"
    return collective
