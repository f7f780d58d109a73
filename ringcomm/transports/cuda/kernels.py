"""The CUDA kernels by name, and which of them does a collective."""

from typing import Any, NamedTuple

from ringcomm.devices.contract import KernelVariant
from ringcomm.devices.limits import Limits
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import Blockwise
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import COLLECTIVES, KERNELS, WHOLE

__all__ = ["LaunchPlan", "plan_launch", "variant_of"]

NAMES = tuple(KERNELS)


class LaunchPlan(NamedTuple):
    """How a call is launched."""

    kernel: str
    variant: KernelVariant
    blocks: int
    count: int  # type: ignore[assignment]  # elements of the array, or of a block; in place of tuple.count


def plan_launch(call: Blockwise, shape: Any, limits: Limits, kernel: str = "") -> LaunchPlan:
    """Return the launch of a call with equal blocks in arenas of an rc_cuda_shape, with the kernel for its size or with
    a given one.
    """
    count = call.count if call.name in WHOLE else call.rows[call.me]
    arguments = CollectiveCall(ffi.NULL, ffi.NULL, count, call.dtype, call.op, call.factor, call.root)
    plan = ffi.new("rc_cuda_plan *")
    number = KERNELS[kernel] if kernel else -1
    check(lib.rc_cuda_plan_of(shape, [limits], COLLECTIVES[call.name].code, [arguments], number, plan))
    return LaunchPlan(NAMES[plan.kernel], variant_of(plan), plan.blocks, plan.count)


def variant_of(plan: Any) -> KernelVariant:
    """Return the variant to compile for an rc_cuda_plan."""
    return KernelVariant(plan.kernel, plan.dtype, plan.op)
