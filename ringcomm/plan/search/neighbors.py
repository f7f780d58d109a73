"""Why the best layout is the best: what it takes, and whether it fits, with one of its choices changed."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import gcd
from typing import Any

from ringcomm.plan.model.devices import Accelerator
from ringcomm.plan.model.layout import RECOMPUTE, ZERO_STAGES, ParallelLayout
from ringcomm.plan.model.transformer import Transformer, divisors
from ringcomm.plan.search.search import Candidate, SearchResult, layouts, price

__all__ = ["Explainer"]

CHOICES = (
    *(("tp",), ("pp", "chunks"), ("cp",), ("ep",)),
    *(("micro_batch",), ("recompute",), ("sequence_parallel",), ("zero",)),
)


class Explainer:
    """Prices the layouts around the best of a search.

    Args:
        model, device, batch: those of the search
        result: what it has found
    """

    def __init__(self, model: Transformer, device: Accelerator, batch: int, result: SearchResult) -> None:
        self.model, self.device, self.batch = model, device, batch
        self.fixed, self.best = result.fixed, result.best[0].layout

    def near(self) -> Iterator[Candidate]:
        """Yield the layouts next to the best: in each choice the nearest smaller and larger value, fit or not."""
        model, best = self.model, self.best
        values: dict[str, list[Any]] = {
            "tp": divisors(model.heads),
            "pp": divisors(model.layers),
            "cp": divisors(model.seq),
            "ep": divisors(model.experts) if model.experts else [1],
            "micro_batch": divisors(self.batch // best.dp),
            "chunks": divisors(model.layers // best.pp),
            "recompute": [*RECOMPUTE],
            "sequence_parallel": [False, True],
            "zero": [*ZERO_STAGES],
        }
        for name, known in values.items():
            place = known.index(getattr(best, name))
            for others in known[:place][::-1], known[place + 1 :]:
                changed = (self._changed({name: value}) for value in others)
                yield from [each for each in changed if each][:1]

    def between(self, other: ParallelLayout) -> list[Candidate]:
        """Return the best layout with each single choice of another in which they differ."""
        changes = ({name: getattr(other, name) for name in names} for names in CHOICES)
        return [each for change in changes if (each := self._changed(change)) and each.layout != other]

    def _changed(self, change: Mapping[str, Any]) -> Candidate | None:
        """Return the best layout with a change and what follows from it; None if it is the same or was not searched."""
        layout = replace(self.best, **change)
        gpus = self.best.gpus
        layout = replace(layout, dp=gpus // (layout.tp * layout.pp * layout.cp))
        if not layout.dp or self.batch % layout.dp:
            return None
        layout = replace(
            layout,
            micro_batch=gcd(layout.micro_batch, self.batch // layout.dp),
            chunks=gcd(layout.chunks, self.model.layers // layout.pp) if layout.pp > 1 else 1,
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            ep=gcd(layout.ep, layout.dp),
        )
        sharable = 3 if (layout.tp, layout.cp, layout.chunks, layout.ep) == (1, 1, 1, 1) else 2
        layout = replace(layout, zero=min(layout.zero, sharable) if layout.dp * layout.cp > 1 else 0)
        alike = {**asdict(layout), "schedule": layout.schedule, **self.fixed}
        if layout == self.best or layout not in layouts(self.model, self.device, gpus, self.batch, alike):
            return None
        return price(self.model, self.device, gpus, self.batch, layout)
