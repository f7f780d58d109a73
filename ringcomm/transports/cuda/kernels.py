"""Choose the CUDA kernel of a collective and its number of blocks."""

from dataclasses import dataclass
from itertools import accumulate

from ringcomm.devices.contract import KernelVariant, Shape
from ringcomm.transports.blocks import Blockwise
from ringcomm.types import DTYPES, OPS, WHOLE

__all__ = ["KERNELS", "REASONS", "REDUCING", "LaunchPlan", "plan_launch"]


# In the order of `enum Kernel` (kernels.cuh) and of `enum Reason` (call.cuh).
REDUCING = ("ring_all_reduce", "ring_reduce_scatter", "ring_reduce", "one_shot", "two_shot", "ll")
MOVING = ("ring_all_gather", "ring_broadcast", "gather", "scatter", "all_gather", "all_to_all")
KERNELS = {name: number for number, name in enumerate(("barrier", *REDUCING, *MOVING))}
REASONS = ("", "not started", "no data", "no slot", "mismatch", "aborted")
# A kernel that only moves data is compiled once for each size of an element.
MOVED = {1: DTYPES["uint8"], 2: DTYPES["uint16"], 4: DTYPES["uint32"], 8: DTYPES["uint64"], 16: DTYPES["complex128"]}
SUM, _ = OPS["sum"]


@dataclass(slots=True)  # frozen would take a microsecond more to make
class LaunchPlan:
    """How a call is launched."""

    kernel: str
    variant: KernelVariant
    blocks: int
    count: int  # elements of the array, or of a block
    send_offsets: list[int] | None  # of unequal blocks
    recv_offsets: list[int] | None


def plan_launch(call: Blockwise, shape: Shape, kernel: str = "") -> LaunchPlan:
    """Return the launch of a call, with the kernel for its size or with a given one."""
    whole = call.name in WHOLE
    size = (call.count if whole else max(call.rows)) * call.item  # of the array, or of the largest block
    blocks = min(shape.channels, max(1, -(-size // shape.stage_bytes)))
    equal = whole or len({*call.rows}) == 1
    if call.recv_rows is not call.rows:  # counts of all_to_all: only the two ranks of a pair know them
        blocks, equal = shape.channels, False
    kernel = kernel or _kernel(call.name, size, call.n, shape)
    dtype, op = (call.dtype, call.op) if kernel in REDUCING else (MOVED[call.item], SUM)
    return LaunchPlan(
        kernel,
        KernelVariant(KERNELS[kernel], dtype, op),
        1 if kernel == "ll" else blocks,
        call.count if whole else call.rows[0],
        None if equal else [0, *accumulate(call.rows)],
        None if equal else [0, *accumulate(call.recv_rows)],
    )


def _kernel(collective: str, size: int, n: int, shape: Shape) -> str:
    """Few bytes go to every rank at once, many along the ring, where each link carries the least data."""
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
