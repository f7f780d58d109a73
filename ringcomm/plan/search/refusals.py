"""Why a workload has no legal layout, and what is nearest."""

from collections.abc import Mapping
from itertools import product
from math import prod

from ringcomm.errors import ArgumentError, refuse
from ringcomm.layout_rules import broken, divisors
from ringcomm.plan.model.layout import PLANNED, numbers_of, with_schedule
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.search.layouts import AXES, Fixed, axes, axis_sizes

__all__ = ["no_layout"]


def no_layout(workload: Workload, fixed: Fixed) -> ArgumentError:
    """Return the error of a search without a legal layout: the first thing that contradicts another, or divides none.

    Raises:
        ArgumentError: the same, of a single axis or layout.
    """
    model, gpus, batch = workload.model, workload.gpus, workload.batch
    given_axes: dict[str, int] = {axis: fixed[axis] for axis in AXES if axis in fixed}
    shared = numbers_of(model, batch) | {"attention": workload.device.attention}
    for name, value in fixed.items():
        error = broken({**shared, name: value}, rules=PLANNED) if name in (*given_axes, "recompute") else None
        if error:
            raise error
    given = " · ".join(f"{axis} {size}" for axis, size in given_axes.items())
    if gpus % prod(given_axes.values()):
        return refuse("gpus", f"a multiple of {given}{_nearest_multiples(gpus, given_axes)}", gpus)
    counts = {1}
    for sizes in axis_sizes(workload, fixed).values():
        counts = {count * size for count, size in product(counts, sizes) if count * size <= 2 * gpus}
    nearest = min(counts, key=lambda count: (abs(count - gpus), count))
    what = f"{model.layers} layers, {model.heads} heads and a batch of {batch}"
    if nearest != gpus:
        with_axes = f" with {given}" if given else ""
        return refuse("gpus", f"a number over which {what} divide{with_axes} (nearest: {nearest})", gpus)
    # Pipelines first: only they can have chunks.
    for tp, pp, dp, cp in sorted(axes(workload, fixed), key=lambda sizes: sizes[1] == 1):
        layout = with_schedule(**{**fixed, "tp": tp, "pp": pp, "dp": dp, "cp": cp})
        layout.check(model, batch, gpus, workload.device.attention)
    chosen = ", ".join(f"{name} {value}" for name, value in fixed.items())
    return ArgumentError(f"no layout of {gpus} GPUs has {chosen}, for {what}")


def _nearest_multiples(gpus: int, axes: Mapping[str, int]) -> str:
    """Return how to make the number of GPUs a multiple of the axes: other numbers, or another size of the last axis."""
    whole = prod(axes.values())
    below = gpus // whole * whole
    near = f"nearest: {below} or {below + whole}" if below else f"nearest: {whole}"
    *_, axis = axes
    others = whole // axes[axis]
    if len(axes) > 1 and gpus % others == 0:
        sizes = [size for size in divisors(gpus // others) if size < axes[axis]]
        near += f"; or {axis} {sizes[-1]}"
    return f" ({near})"
