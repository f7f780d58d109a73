"""Every layout of a workload that `ringcomm.parallel` can run, and that has nothing idle."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from ringcomm.layout_rules import Rule, broken, divisors
from ringcomm.pipelining.schedule import SPLIT_BACKWARD
from ringcomm.plan.model.layout import PLANNED, RECOMPUTE, SCHEDULES, ZERO_STAGES, ParallelLayout, numbers_of
from ringcomm.plan.model.workload import Workload

__all__ = ["Fixed", "axes", "axis_sizes", "layouts", "values_of"]

AXES = ("tp", "pp", "dp", "cp")
CHOICES = ("micro_batch", "ep", "sequence_parallel", "chunks", "recompute", "zero")  # in this order, after the axes
FOLLOWS = {"micro_batches": "micro_batch", "schedule": "chunks"}  # from which choice
FIELDS = tuple(each.name for each in fields(ParallelLayout))


def _last_of(rule: Rule) -> str:
    """Return the number of a rule that is chosen last."""
    order = (*AXES, *CHOICES)
    chosen = {FOLLOWS.get(name, name) for name in rule.needs}
    return max(chosen.intersection(order), key=order.index)


RULES_OF = {name: [rule for rule in PLANNED if _last_of(rule) == name] for name in (*AXES, *CHOICES)}


def _reads(choice: str) -> tuple[str, ...]:
    """Return the numbers chosen before on which it depends what may be chosen."""
    needed = {"dp", "pp"}.union(*(rule.needs for rule in RULES_OF[choice]))  # values_of reads these two
    needed |= {FOLLOWS[name] for name in needed & FOLLOWS.keys()}
    return tuple(name for name in (*AXES, *CHOICES) if name in needed - {choice})


READS = {choice: _reads(choice) for choice in CHOICES}

Numbers = dict[str, Any]
Fixed = Mapping[str, Any]  # fields of ParallelLayout, and the name of its schedule


def layouts(workload: Workload, fixed: Fixed | None = None) -> Iterator[ParallelLayout]:
    """Yield every legal layout, those of a family one after another.

    Backward is split only if the schedule is fixed to one that does: such schedules have no closed form, and take long
    to price.
    """
    fixed = fixed or {}
    split = fixed.get("schedule") in SPLIT_BACKWARD
    legal: dict[object, list[Any]] = {}
    for tp, pp, dp, cp in axes(workload, fixed):
        known = _numbers(workload) | {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "split_backward": split}
        for _ in _with_choices(known, fixed, CHOICES, legal):
            yield ParallelLayout(*map(known.__getitem__, FIELDS))


def axis_sizes(workload: Workload, fixed: Fixed) -> dict[str, list[int]]:
    """Return the sizes of each axis that divide what it shares."""
    known = _numbers(workload)
    return {
        axis: [
            size
            for size in _allowed(fixed, axis, values_of(axis, known))
            if not broken(known | {axis: size}, RULES_OF[axis])
        ]
        for axis in AXES
    }


def axes(workload: Workload, fixed: Fixed) -> Iterator[tuple[int, int, int, int]]:
    """Yield tp, pp, dp and cp."""
    sizes = axis_sizes(workload, fixed)
    replicas = {*sizes["dp"]}
    for tp, pp, cp in product(sizes["tp"], sizes["pp"], sizes["cp"]):
        dp, rest = divmod(workload.gpus, tp * pp * cp)
        if not rest and dp in replicas:
            yield tp, pp, dp, cp


def _with_choices(known: Numbers, fixed: Fixed, names: Sequence[str], legal: dict[object, list[Any]]) -> Iterator[None]:
    """Add all choices of the other numbers that break no rule to these, one after another.

    `legal` keeps the values of a choice for the numbers that it depends on.
    """
    if not names:
        yield
        return
    name, *others = names
    key = name, *map(known.__getitem__, READS[name])
    if key not in legal:
        legal[key] = [each for each in _allowed(fixed, name, values_of(name, known)) if _fits(known, fixed, name, each)]
    for value in legal[key]:
        _choose(known, name, value)
        yield from _with_choices(known, fixed, others, legal)


def _choose(known: Numbers, name: str, value: Any) -> None:
    known[name] = value
    if name == "micro_batch":
        known["micro_batches"] = known["batch"] // known["dp"] // value
    if name == "chunks":
        known["schedule"] = SCHEDULES[known["split_backward"], value > 1]


def _fits(known: Numbers, fixed: Fixed, name: str, value: Any) -> bool:
    _choose(known, name, value)
    schedule = known.get("schedule")
    return not broken(known, RULES_OF[name]) and (name != "chunks" or fixed.get("schedule", schedule) == schedule)


def values_of(name: str, known: Numbers) -> Sequence[Any]:
    """Return the values of a field that divide what it shares, ascending."""
    match name:
        case "recompute":
            return RECOMPUTE
        case "zero":
            return ZERO_STAGES
        case "sequence_parallel":
            return False, True
        case "micro_batch":
            return divisors(known["batch"] // known["dp"])
        case "chunks":
            return divisors(known["layers"] // known["pp"])
    return divisors(known[{"tp": "heads", "pp": "layers", "dp": "batch", "cp": "seq", "ep": "experts"}[name]] or 1)


def _numbers(workload: Workload) -> Numbers:
    return numbers_of(workload.model, workload.batch) | {"attention": workload.device.attention}


def _allowed(fixed: Mapping[str, object], name: str, values: Sequence[Any]) -> list[Any]:
    return [each for each in values if fixed.get(name, each) == each]
