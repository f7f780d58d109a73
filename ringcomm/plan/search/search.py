"""Every layout of a model on a cluster: those that fit into memory, by time; and why the others are out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, product, takewhile
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

from ringcomm.errors import ArgumentError, integer, refuse
from ringcomm.pipelining.schedule import SPLIT_BACKWARD
from ringcomm.plan.model.devices import Accelerator, gib
from ringcomm.plan.model.layout import RECOMPUTE, SCHEDULES, ZERO_STAGES, ParallelLayout, check_axis, with_schedule
from ringcomm.plan.model.transformer import MOST, Transformer, divisors
from ringcomm.plan.price.memory import MemoryUse, memory_use
from ringcomm.plan.price.step import Pricing, StepCost

__all__ = ["TIE", "Candidate", "SearchResult", "differences", "layouts", "price", "search"]

MOST_LAYOUTS = 500_000  # that a search prices: half a minute; of 16,384 GPUs it has 200,000
TIE = 0.001  # of a step: layouts whose times differ by less take as long, and the simpler is better

T = TypeVar("T")
Fixed = Mapping[str, Any]  # fields of ParallelLayout that the caller has chosen
Priced = tuple[float, ParallelLayout]  # seconds of a step


class Candidate(NamedTuple):
    """A layout with its cost, and the memory of the fullest rank."""

    layout: ParallelLayout
    cost: StepCost
    memory: MemoryUse


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        fixed: what was not searched
        best: the layouts that fit, fastest first, one for each grid, micro-batch and sequence parallelism
        legal: number of layouts that `ringcomm.parallel` can run
        fitting: number of them that fit
        short: bytes that are missing at least, by (tp, pp), where no layout fits
        indivisible: sizes of axes that divide the GPUs, but not the heads (tp), the layers (pp) or the batch (dp)
    """

    fixed: Fixed
    best: list[Candidate]
    legal: int
    fitting: int
    short: dict[tuple[int, int], float]
    indivisible: dict[str, list[int]]


def price(model: Transformer, device: Accelerator, gpus: int, batch: int, layout: ParallelLayout) -> Candidate:
    """Return one layout with its cost, whether it fits or not.

    Raises:
        ArgumentError: it is not legal.
    """
    layout.check(model, batch, gpus)
    _check_attention(device, layout.cp, layout.recompute)
    return Candidate(layout, Pricing(model, device, gpus, batch).step(layout), _fullest(model, device, batch, layout))


def search(
    model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed | None = None, top: int = 10
) -> SearchResult:
    """Return the `top` fastest layouts that fit.

    Args:
        model: the model
        device: the GPUs
        gpus: their number
        batch: sequences of a batch, of all replicas together
        fixed: values of fields of ParallelLayout, and its schedule; the others are free
        top: number of layouts

    Raises:
        ArgumentError: no layout is legal, or none fits, and what is nearest; or there are too many.
    """
    fixed = fixed or {}
    for name, number in (("gpus", gpus), ("batch", batch)):
        integer(name, number, 1, MOST)
    legal = sum(1 for _ in islice(layouts(model, device, gpus, batch, fixed), MOST_LAYOUTS + 1))
    if not legal:
        raise _no_layout(model, device, gpus, batch, fixed)
    if legal > MOST_LAYOUTS:
        raise ArgumentError(f"more than {MOST_LAYOUTS:,} layouts are possible: fix --tp, --pp or --micro-batch")
    pricing, fitting = Pricing(model, device, gpus, batch), 0
    found: list[Priced] = []
    short: dict[tuple[int, int], float] = {}
    for _, variants in groupby(layouts(model, device, gpus, batch, fixed), _family):
        able: dict[tuple[int, int], Priced] = {}  # by chunks and ZeRO: with less recomputation a step is faster
        for layout in variants:
            missing = _fullest(model, device, batch, layout).total - device.available
            shape = layout.tp, layout.pp
            short[shape] = min(short.get(shape, missing), missing)
            if missing <= 0:
                fitting += 1
                if (layout.chunks, layout.zero) not in able:
                    able[layout.chunks, layout.zero] = pricing.step(layout).seconds, layout
        found += _ordered(able.values())[:1]
    if not found:
        (tp, pp), missing = min(short.items(), key=lambda item: item[1])
        raise ArgumentError(
            f"memory: no layout fits {device.name}, which has {gib(device.available)}; the smallest, with "
            f"tp {tp} and pp {pp}, needs {gib(missing)} more"
        )
    best = [price(model, device, gpus, batch, layout) for _, layout in _ordered(found)[:top]]
    out = {shape: missing for shape, missing in sorted(short.items()) if missing > 0}
    free = {"tp": model.heads, "pp": model.layers, "dp": batch}.items()
    uneven = {axis: [each for each in divisors(gpus) if number % each] for axis, number in free if axis not in fixed}
    return SearchResult(fixed, best, legal, fitting, out, uneven)


def layouts(
    model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed | None = None
) -> Iterator[ParallelLayout]:
    """Yield every legal layout, those of a family one after another.

    Sequence parallelism needs tp > 1, ZeRO replicas, expert parallelism experts, and selective recomputation unfused
    attention, which stores its scores; ring attention is fused, so cp > 1 needs fused attention. Backward is split only
    if the schedule is fixed to one that does: such schedules have no closed form, and take long to price.
    """
    fixed = fixed or {}
    schedules = [fixed["schedule"]] if "schedule" in fixed else ["1f1b", "interleaved"]
    split = schedules[0] in SPLIT_BACKWARD
    for tp, pp, dp, cp in _axes(model, device, gpus, batch, fixed):
        share = batch // dp
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


def differences(candidate: Candidate, best: Candidate) -> list[tuple[str, float]]:
    """Return by how many seconds each part takes longer than in the best layout; those that lose most first."""
    more = {part: seconds - best.cost.parts[part] for part, seconds in candidate.cost.parts.items()}
    return sorted(more.items(), key=lambda each: -each[1])


def _ordered(found: Iterable[Priced]) -> list[Priced]:
    """Return layouts, the faster first; of those that take as long as the fastest of them, the simpler."""
    rest, ordered = sorted(found), []
    while rest:
        limit = rest[0][0] * (1 + TIE)
        tied = list(takewhile(lambda each: each[0] <= limit, rest))  # noqa: B023 (consumed before limit changes)
        ordered += sorted(tied, key=lambda each: (*_complexity(each[1]), *each))
        del rest[: len(tied)]
    return ordered


def _complexity(layout: ParallelLayout) -> tuple[int, ...]:
    again = RECOMPUTE.index(layout.recompute)
    return layout.cp, layout.tp, layout.pp, layout.ep, layout.zero, layout.chunks, again


def _family(layout: ParallelLayout) -> tuple[object, ...]:
    """Return the grid, micro-batch and sequence parallelism. Layouts of a family differ in chunks and what saves
    memory.
    """
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel


def _sizes(model: Transformer, device: Accelerator, batch: int, fixed: Fixed) -> dict[str, list[int]]:
    """Return the sizes of each axis that divide what it shares."""
    keys, unfused = model.kv_heads or model.heads, device.attention == "unfused"
    sizes = {
        "tp": [tp for tp in divisors(gcd(model.heads, model.inner)) if keys % tp == 0 or tp % keys == 0],
        "pp": divisors(model.layers),
        "dp": divisors(batch),
        "cp": [cp for cp in divisors(model.seq) if cp == 1 or (model.seq % (2 * cp) == 0 and not unfused)],
    }
    return {axis: _allowed(fixed, axis, values) for axis, values in sizes.items()}


def _axes(
    model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed
) -> Iterator[tuple[int, int, int, int]]:
    """Yield tp, pp, dp and cp."""
    sizes = _sizes(model, device, batch, fixed)
    replicas = {*sizes["dp"]}
    for tp, pp, cp in product(sizes["tp"], sizes["pp"], sizes["cp"]):
        dp, rest = divmod(gpus, tp * pp * cp)
        if not rest and dp in replicas:
            yield tp, pp, dp, cp


def _allowed(fixed: Fixed, name: str, values: Sequence[T]) -> list[T]:
    return [each for each in values if fixed.get(name, each) == each]


def _fullest(model: Transformer, device: Accelerator, batch: int, layout: ParallelLayout) -> MemoryUse:
    """Return the memory of the rank that needs most: the first, which has most in flight, or the last, with logits."""
    ranks = {0, layout.pp - 1}
    return max((memory_use(model, layout, device, batch, rank) for rank in ranks), key=lambda use: use.total)


def _check_attention(device: Accelerator, cp: int = 1, recompute: str = "none", **_: Any) -> None:
    if cp > 1 and device.attention == "unfused":
        raise refuse("cp", "1 with unfused attention, as ring attention is fused", cp)
    if recompute == "selective" and device.attention == "fused":
        raise refuse("recompute", "none or full with fused attention, which stores no scores", recompute)


def _no_layout(model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed) -> ArgumentError:
    """Return the error of a search without a legal layout: the first thing that contradicts another, or divides none.

    Raises:
        ArgumentError: the same, of a single axis or layout.
    """
    axes = {axis: fixed[axis] for axis in ("tp", "pp", "dp", "cp") if axis in fixed}
    for axis, size in axes.items():
        check_axis(axis, size, model, batch)
    _check_attention(device, **fixed)
    given = " · ".join(f"{axis} {size}" for axis, size in axes.items())
    if gpus % prod(axes.values()):
        return refuse("gpus", f"a multiple of {given}{_nearest_multiples(gpus, axes)}", gpus)
    counts = {1}
    for sizes in _sizes(model, device, batch, fixed).values():
        counts = {count * size for count, size in product(counts, sizes) if count * size <= 2 * gpus}
    nearest = min(counts, key=lambda count: (abs(count - gpus), count))
    what = f"{model.layers} layers, {model.heads} heads and a batch of {batch}"
    if nearest != gpus:
        with_axes = f" with {given}" if given else ""
        return refuse("gpus", f"a number over which {what} divide{with_axes} (nearest: {nearest})", gpus)
    rest = {name: value for name, value in fixed.items() if name not in axes}
    # Pipelines first: only they can have chunks.
    for tp, pp, dp, cp in sorted(_axes(model, device, gpus, batch, fixed), key=lambda sizes: sizes[1] == 1):
        with_schedule(tp=tp, pp=pp, dp=dp, cp=cp, **rest).check(model, batch, gpus)
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
