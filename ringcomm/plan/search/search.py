"""The fastest layouts of a workload that fit into memory, and why the others are out."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice, takewhile

from ringcomm.errors import ArgumentError, integer
from ringcomm.layout_rules import divisors
from ringcomm.plan.model.devices import gib
from ringcomm.plan.model.layout import RECOMPUTE, ParallelLayout
from ringcomm.plan.model.transformer import MOST
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.candidate import Candidate, fullest, price
from ringcomm.plan.price.step import Pricing
from ringcomm.plan.search.layouts import Fixed, layouts
from ringcomm.plan.search.refusals import no_layout

__all__ = ["TIE", "SearchResult", "differences", "search"]

MOST_LAYOUTS = 500_000  # that a search prices: half a minute; of 16,384 GPUs it has 200,000
TIE = 0.001  # of a step: layouts whose times differ by less take as long, and the simpler is better

Priced = tuple[float, ParallelLayout]  # seconds of a step


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        workload: that of the search
        fixed: what was not searched
        best: the layouts that fit, fastest first, one for each grid, micro-batch and sequence parallelism
        legal: number of layouts that `ringcomm.parallel` can run
        fitting: number of them that fit
        short: bytes that are missing at least, by (tp, pp), where no layout fits
        indivisible: sizes of axes that divide the GPUs, but not the heads (tp), the layers (pp) or the batch (dp)
    """

    workload: Workload
    fixed: Fixed
    best: list[Candidate]
    legal: int
    fitting: int
    short: dict[tuple[int, int], float]
    indivisible: dict[str, list[int]]


def search(workload: Workload, fixed: Fixed | None = None, top: int = 10) -> SearchResult:
    """Return the `top` fastest layouts that fit.

    Args:
        workload: the workload
        fixed: values of fields of ParallelLayout, and its schedule; the others are free
        top: number of layouts

    Raises:
        ArgumentError: no layout is legal, or none fits, and what is nearest; or there are too many.
    """
    model, device, fixed = workload.model, workload.device, fixed or {}
    for name in ("gpus", "batch"):
        integer(name, getattr(workload, name), 1, MOST)
    legal = sum(1 for _ in islice(layouts(workload, fixed), MOST_LAYOUTS + 1))
    if not legal:
        raise no_layout(workload, fixed)
    if legal > MOST_LAYOUTS:
        raise ArgumentError(f"more than {MOST_LAYOUTS:,} layouts are possible: fix --tp, --pp or --micro-batch")
    pricing, fitting = Pricing(workload), 0
    found: list[Priced] = []
    short: dict[tuple[int, int], float] = {}
    for _, variants in groupby(layouts(workload, fixed), _family):
        able: dict[tuple[int, int], Priced] = {}  # by chunks and ZeRO: with less recomputation a step is faster
        for layout in variants:
            missing = fullest(workload, layout).total - device.available
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
    best = [price(workload, layout) for _, layout in _ordered(found)[:top]]
    out = {shape: missing for shape, missing in sorted(short.items()) if missing > 0}
    free = {"tp": model.heads, "pp": model.layers, "dp": workload.batch}.items()
    counts = divisors(workload.gpus)
    uneven = {axis: [each for each in counts if number % each] for axis, number in free if axis not in fixed}
    return SearchResult(workload, fixed, best, legal, fitting, out, uneven)


def differences(candidate: Candidate, best: Candidate) -> list[tuple[str, float]]:
    """Return by how many seconds each part takes longer than in the best layout; those that lose most first."""
    more = {part: seconds - getattr(best.cost.parts, part) for part, seconds in candidate.cost.parts._asdict().items()}
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
