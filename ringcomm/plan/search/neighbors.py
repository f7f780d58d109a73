"""Why the best layout is the best: what it takes, and whether it fits, with one of its choices changed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import gcd
from typing import Any

from ringcomm.errors import ArgumentError
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.price.candidate import Candidate, price
from ringcomm.plan.search.layouts import values_of
from ringcomm.plan.search.search import SearchResult

__all__ = ["between", "near"]

CHOICES = (
    *(("tp",), ("pp", "chunks"), ("cp",), ("ep",)),
    *(("micro_batch",), ("recompute",), ("sequence_parallel",), ("zero",)),
)


def near(result: SearchResult) -> Iterator[Candidate]:
    """Yield the layouts next to the best: in each choice the nearest smaller and larger value, fit or not."""
    workload, best = result.workload, result.best[0].layout
    numbers = best.numbers(workload.model, workload.batch)
    for name in ("tp", "pp", "cp", "ep", "micro_batch", "chunks", "recompute", "sequence_parallel", "zero"):
        known = [*values_of(name, numbers)]
        at = known.index(getattr(best, name))
        for others in known[:at][::-1], known[at + 1 :]:
            changed = (_changed(result, {name: value}) for value in others)
            yield from islice(filter(None, changed), 1)


def between(result: SearchResult, other: ParallelLayout) -> list[Candidate]:
    """Return the best layout with each single choice of another in which they differ."""
    changes = ({name: getattr(other, name) for name in names} for names in CHOICES)
    return [each for change in changes if (each := _changed(result, change)) and each.layout != other]


def _changed(result: SearchResult, change: Mapping[str, Any]) -> Candidate | None:
    """Return the best layout with a change and what follows from it; None if it is the same or was not searched."""
    workload, best = result.workload, result.best[0].layout
    layout = replace(best, **change)
    layout = replace(layout, dp=workload.gpus // (layout.tp * layout.pp * layout.cp))
    if not layout.dp:
        return None
    layout = replace(
        layout,
        micro_batch=gcd(layout.micro_batch, workload.batch // layout.dp),
        chunks=gcd(layout.chunks, workload.model.layers // layout.pp) if layout.pp > 1 else 1,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        ep=gcd(layout.ep, layout.dp),
    )
    sharable = 3 if (layout.tp, layout.cp, layout.chunks, layout.ep) == (1, 1, 1, 1) else 2
    layout = replace(layout, zero=min(layout.zero, sharable) if layout.dp * layout.cp > 1 else 0)
    if layout == best or any(getattr(layout, name) != value for name, value in result.fixed.items()):
        return None
    try:
        return price(workload, layout)
    except ArgumentError:  # it is not legal
        return None
