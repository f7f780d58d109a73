"""Every layout of a workload that `ringcomm.parallel` can run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from typing import Any, TypeVar

from ringcomm.pipelining.schedule import SPLIT_BACKWARD
from ringcomm.plan.model.layout import RECOMPUTE, SCHEDULES, ZERO_STAGES, LayoutFields, ParallelLayout
from ringcomm.plan.model.transformer import divisors
from ringcomm.plan.model.workload import Workload

__all__ = ["axes", "axis_sizes", "layouts"]

T = TypeVar("T")


def layouts(workload: Workload, fixed: LayoutFields | None = None) -> Iterator[ParallelLayout]:
    """Yield every legal layout, those of a family one after another.

    Sequence parallelism needs tp > 1, ZeRO replicas, expert parallelism experts, and selective recomputation unfused
    attention, which stores its scores; ring attention is fused, so cp > 1 needs fused attention. Backward is split only
    if the schedule is fixed to one that does: such schedules have no closed form, and take long to price.
    """
    model, device, fixed = workload.model, workload.device, fixed or {}
    schedules = [fixed["schedule"]] if "schedule" in fixed else ["1f1b", "interleaved"]
    split = schedules[0] in SPLIT_BACKWARD
    for tp, pp, dp, cp in axes(workload, fixed):
        share = workload.batch // dp
        sharded = [False, True] if tp > 1 and model.seq // cp % tp == 0 else [False]
        stored = device.attention == "unfused"
        recompute = [each for each in RECOMPUTE if each == "none" or (not split and (stored or each == "full"))]
        zero = ZERO_STAGES if dp * cp > 1 else ZERO_STAGES[:1]
        for micro_batch in _allowed(fixed, "micro_batch", divisors(share)):
            several = [] if pp == 1 or (not split and share // micro_batch % pp) else divisors(model.layers // pp)[1:]
            chunks = [1] * (pp > 1 or not split) + [each for each in several if not split or each == 2]
            chunks = [each for each in _allowed(fixed, "chunks", chunks) if SCHEDULES[split, each > 1] in schedules]
            choices: Iterable[tuple[Any, ...]] = product(
                _allowed(fixed, "ep", divisors(gcd(dp, model.experts)) if model.experts else [1]),
                _allowed(fixed, "sequence_parallel", sharded),
                chunks,
                _allowed(fixed, "recompute", recompute),
                _allowed(fixed, "zero", zero),
            )
            for ep, sequence_parallel, v, again, stage in choices:
                if stage < 3 or (tp, cp, v, ep, split) == (1, 1, 1, 1, False):
                    yield ParallelLayout(tp, pp, dp, cp, micro_batch, v, again, sequence_parallel, stage, split, ep)


def axis_sizes(workload: Workload, fixed: LayoutFields) -> dict[str, list[int]]:
    """Return the sizes of each axis that divide what it shares."""
    model = workload.model
    keys, unfused = model.kv_heads or model.heads, workload.device.attention == "unfused"
    sizes = {
        "tp": [tp for tp in divisors(gcd(model.heads, model.inner)) if keys % tp == 0 or tp % keys == 0],
        "pp": divisors(model.layers),
        "dp": divisors(workload.batch),
        "cp": [cp for cp in divisors(model.seq) if cp == 1 or (model.seq % (2 * cp) == 0 and not unfused)],
    }
    return {axis: _allowed(fixed, axis, values) for axis, values in sizes.items()}


def axes(workload: Workload, fixed: LayoutFields) -> Iterator[tuple[int, int, int, int]]:
    """Yield tp, pp, dp and cp."""
    sizes = axis_sizes(workload, fixed)
    replicas = {*sizes["dp"]}
    for tp, pp, cp in product(sizes["tp"], sizes["pp"], sizes["cp"]):
        dp, rest = divmod(workload.gpus, tp * pp * cp)
        if not rest and dp in replicas:
            yield tp, pp, dp, cp


def _allowed(fixed: Mapping[str, object], name: str, values: Sequence[T]) -> list[T]:
    return [each for each in values if fixed.get(name, each) == each]
