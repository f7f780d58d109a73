"""Every layout of a model on a cluster: those that fit into memory, by time; and why the others are out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple, TypeVar

from ringcomm.errors import ArgumentError, refuse
from ringcomm.plan.cost import Pricing, StepCost
from ringcomm.plan.devices import Accelerator
from ringcomm.plan.layout import RECOMPUTE, SCHEDULES, ZERO_STAGES, ParallelLayout, check_axis
from ringcomm.plan.memory import MemoryUse, memory_use
from ringcomm.plan.model import Transformer

__all__ = ["Candidate", "SearchResult", "differences", "layouts", "price", "search"]

LEAST_TOKENS = 1024  # of a rank with context parallelism: shorter parts only add messages

T = TypeVar("T")
Fixed = Mapping[str, Any]  # fields of ParallelLayout that the caller has chosen


class Candidate(NamedTuple):
    """A layout with its cost, and the memory of the fullest rank."""

    layout: ParallelLayout
    cost: StepCost
    memory: MemoryUse


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        best: the layouts that fit, fastest first; of those that differ only in what saves memory, the fastest
        legal: number of layouts that `ringcomm.parallel` can run
        fitting: number of them that fit
        short: bytes that are missing at least, by (tp, pp), where no layout fits
        indivisible: sizes of axes that divide the GPUs, but not the heads (tp), the layers (pp) or the batch (dp)
    """

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
        ArgumentError: no layout is legal, or none fits; the message says what is nearest.
    """
    fixed = fixed or {}
    pricing, legal, fitting = Pricing(model, device, gpus, batch), 0, 0
    found: list[tuple[float, ParallelLayout]] = []
    short: dict[tuple[int, int], float] = {}
    for _, variants in groupby(layouts(model, device, gpus, batch, fixed), _without_savings):
        able = []
        for layout in variants:
            legal += 1
            missing = _fullest(model, device, batch, layout).total - device.available
            family = layout.tp, layout.pp
            short[family] = min(short.get(family, missing), missing)
            if missing <= 0:
                able.append((pricing.step(layout).seconds, layout))
        fitting += len(able)
        found += [min(able)] if able else []
    if not legal:
        raise _no_layout(model, device, gpus, batch, fixed)
    if not found:
        (tp, pp), missing = min(short.items(), key=lambda item: item[1])
        raise ArgumentError(
            f"memory: no layout fits {device.name}, which has {device.available / 1e9:.1f} GB; the smallest, with "
            f"tp {tp} and pp {pp}, needs {missing / 1e9:.1f} GB more"
        )
    best = [price(model, device, gpus, batch, layout) for _, layout in sorted(found)[:top]]
    out = {family: missing for family, missing in sorted(short.items()) if missing > 0}
    return SearchResult(best, legal, fitting, out, _indivisible(model, gpus, batch, fixed))


def layouts(
    model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed | None = None
) -> Iterator[ParallelLayout]:
    """Yield every legal layout; those that differ only in what saves memory, one after another.

    Sequence parallelism needs tp > 1, ZeRO replicas, and selective recomputation stored scores. Ring attention does
    not store scores, so a device with unfused attention has cp 1.
    """
    fixed = fixed or {}
    for tp, pp, dp, cp in _axes(model, device, gpus, batch, fixed):
        share = batch // dp
        sharded = [False, True] if tp > 1 and model.seq // cp % tp == 0 else [False]
        recompute = [each for each in RECOMPUTE if each != "selective" or (device.attention == "unfused" and cp == 1)]
        zero = ZERO_STAGES if dp * cp > 1 else ZERO_STAGES[:1]
        for micro_batch in _allowed(fixed, "micro_batch", _divisors(share)):
            chunks = _divisors(model.layers // pp) if pp > 1 and share // micro_batch % pp == 0 else [1]
            choices: Iterator[tuple[Any, ...]] = product(
                [
                    each
                    for each in _allowed(fixed, "chunks", chunks)
                    if _allowed(fixed, "schedule", [SCHEDULES[each > 1]])
                ],
                _allowed(fixed, "sequence_parallel", sharded),
                _allowed(fixed, "recompute", recompute),
                _allowed(fixed, "zero", zero),
            )
            for chunks, sequence_parallel, again, stage in choices:
                if stage < 3 or (tp, cp, chunks) == (1, 1, 1):
                    yield ParallelLayout(tp, pp, dp, cp, micro_batch, chunks, again, sequence_parallel, stage)


def differences(candidate: Candidate, best: Candidate) -> list[tuple[str, float]]:
    """Return by how many seconds each part takes longer than in the best layout; those that lose most first."""
    more = {part: seconds - best.cost.parts[part] for part, seconds in candidate.cost.parts.items()}
    return sorted(more.items(), key=lambda each: -each[1])


def _without_savings(layout: ParallelLayout) -> tuple[object, ...]:
    """Return the fields that are not for memory: those with the same differ in recomputation and ZeRO."""
    return layout.tp, layout.pp, layout.cp, layout.micro_batch, layout.chunks, layout.sequence_parallel


def _axes(
    model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed
) -> Iterator[tuple[int, int, int, int]]:
    """Yield tp, pp, dp and cp."""
    parts = [cp for cp in _divisors(model.seq) if cp == 1 or _cuts(model, device, cp, fixed)]
    keys = model.kv_heads or model.heads
    shards = [tp for tp in _divisors(model.heads) if keys % tp == 0 or tp % keys == 0]
    for tp, pp, cp in product(shards, _divisors(model.layers), parts):
        dp, rest = divmod(gpus, tp * pp * cp)
        sizes = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
        if dp and not rest and batch % dp == 0 and all(fixed.get(axis, size) == size for axis, size in sizes.items()):
            yield tp, pp, dp, cp


def _cuts(model: Transformer, device: Accelerator, cp: int, fixed: Fixed) -> bool:
    """Return whether ring attention on cp ranks is possible, and sensible unless it is asked for."""
    sensible = device.attention == "fused" and model.seq // cp >= LEAST_TOKENS
    return model.seq % (2 * cp) == 0 and (sensible or "cp" in fixed)


def _allowed(fixed: Fixed, name: str, values: Sequence[T]) -> list[T]:
    return [each for each in values if fixed.get(name, each) == each]


def _fullest(model: Transformer, device: Accelerator, batch: int, layout: ParallelLayout) -> MemoryUse:
    """Return the memory of the rank that needs most: the first, which has most in flight, or the last, with logits."""
    ranks = {0, layout.pp - 1}
    return max((memory_use(model, layout, device, batch, rank) for rank in ranks), key=lambda use: use.total)


def _indivisible(model: Transformer, gpus: int, batch: int, fixed: Fixed) -> dict[str, list[int]]:
    limits = {"tp": model.heads, "pp": model.layers, "dp": batch}
    free = {axis: number for axis, number in limits.items() if axis not in fixed}
    return {axis: [each for each in _divisors(gpus) if number % each] for axis, number in free.items()}


def _no_layout(model: Transformer, device: Accelerator, gpus: int, batch: int, fixed: Fixed) -> ArgumentError:
    """Return the error of a search without a legal layout: the first thing that does not divide."""
    axes = {axis: fixed[axis] for axis in ("tp", "pp", "dp", "cp") if axis in fixed}
    for axis, size in axes.items():
        check_axis(axis, size, model, batch)
    product_of_axes = prod(axes.values())
    if gpus % product_of_axes:
        below = gpus // product_of_axes * product_of_axes
        near = f"{below} or {below + product_of_axes}" if below else f"{product_of_axes}"
        names = " · ".join(f"{axis} {size}" for axis, size in axes.items())
        return refuse("gpus", f"a multiple of {names} (nearest: {near})", gpus)
    for count in sorted(range(1, 2 * gpus), key=lambda count: abs(count - gpus)):
        if any(layouts(model, device, count, batch, axes)):
            break
    chosen = ", ".join(f"{name} {value}" for name, value in fixed.items())
    what = f"{model.layers} layers, {model.heads} heads and a batch of {batch}"
    if count == gpus:
        return ArgumentError(f"no layout of {gpus} GPUs has {chosen}, for {what}")
    with_axes = f" with {chosen}" if chosen else ""
    return ArgumentError(f"gpus: {what} do not divide over {gpus} GPUs{with_axes}; the nearest number is {count}")


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
