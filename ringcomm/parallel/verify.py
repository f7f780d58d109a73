"""Shipped checks: is a parallel model the model of one process, and does it send what the formulas say?

whole = gpt_stages(config, Grid.alone(), seed=seed)
...                                                    # the same steps with `whole` as with `chunks`
check_model(chunks, whole, grid, 1e-10)                # every weight and every gradient

with traffic() as calls:
    ...                                                # a step
assert sent(calls, grid.tp) == tensor_parallel_bytes(...)
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ringcomm.errors import refuse
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.layout import parameters, splits, to_full
from ringcomm.torch import enable_profiler_labels, labels

__all__ = [
    "Call",
    "check_model",
    "data_parallel_bytes",
    "full_gradients",
    "full_weights",
    "pipeline_bytes",
    "sent",
    "tensor_parallel_bytes",
    "traffic",
]


Values = Callable[[nn.Parameter], torch.Tensor | None]

KINDS: dict[str, Values] = {
    "weight": lambda parameter: parameter.detach(),
    "gradient": lambda parameter: parameter.grad,
}

# Gradients of queries may be 1e-10 of the largest, that of a key's bias is zero in theory: what is left when larger
# numbers cancel, which carries their rounding. With this floor no number of a small GPT on up to 8 ranks was seen to be
# off by more than a hundred roundings (2e-14 in float64, 9e-6 in float32); without one, by a hundred times as many.
FLOOR = 1e-5


# --- Values -----------------------------------------------------------------------------------------------------------


def full_weights(chunks: Sequence[nn.Module], grid: Grid) -> dict[str, torch.Tensor]:
    """Return the weights of the full model by name, on every rank that has a part of it.

    Raises:
        AssertionError: tied weights differ.
    """
    return _full(chunks, grid, KINDS["weight"])


def full_gradients(chunks: Sequence[nn.Module], grid: Grid) -> dict[str, torch.Tensor]:
    """Return the gradients of the full model by name, on every rank that has a part of it; no gradient is left out.

    Raises:
        AssertionError: a parameter has none, or those of tied weights differ.
    """
    return _full(chunks, grid, KINDS["gradient"])


def check_model(chunks: Sequence[nn.Module], whole: Sequence[nn.Module], grid: Grid, tolerance: float) -> None:
    """Compare all weights and gradients of a model with those of `whole`, the same model in one process.

    A number may be off by `tolerance` times the sum of the largest of its parameter and, since small gradients carry
    the rounding of the larger numbers that they are made from, FLOOR times the largest of the model.

    Raises:
        AssertionError: another model, or a number that is off by more; the message names the parameter.
    """
    for kind, of in KINDS.items():
        got, expected = _full(chunks, grid, of), _named(whole, of)
        if got.keys() != expected.keys():
            raise AssertionError(f"only one of the models has {sorted(got.keys() ^ expected.keys())}")
        largest = max(float(x.abs().max()) for x in expected.values())
        for name, x in expected.items():
            if got[name].shape != x.shape:
                raise AssertionError(f"{kind} of {name}: {tuple(got[name].shape)} in place of {tuple(x.shape)}")
            off = float((got[name] - x).abs().max())
            own = float(x.abs().max())
            if not off <= tolerance * (own + FLOOR * largest):
                text = f"off by {off:.1e}, where its largest is {own:.1e} and that of the model {largest:.1e}"
                raise AssertionError(f"{kind} of {name}: {text}, on rank {dist.get_rank()} of {grid}")


def _full(chunks: Sequence[nn.Module], grid: Grid, of: Values) -> dict[str, torch.Tensor]:
    """Put the parts of the tensor axis together, then the stages of the pipeline."""
    cuts = {name: split for chunk in chunks for name, split in splits(chunk).items()}
    stages: list[Any] = [None] * grid.pp.size
    dist.all_gather_object(stages, to_full(_named(chunks, of), cuts, grid.tp), group=grid.pp.group)
    return _united(stages)


def _named(chunks: Sequence[nn.Module], of: Values) -> dict[str, torch.Tensor]:
    """Return the values that this rank has, by name."""
    found = [{name: of(parameter) for name, parameter in parameters(chunk)} for chunk in chunks]
    if missing := [name for values in found for name, x in values.items() if x is None]:
        raise AssertionError(f"no gradient of {', '.join(missing)}")
    return _united(found)


def _united(parts: Sequence[Mapping[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    for name, x in (item for values in parts for item in values.items()):
        if x is not None and not torch.equal(full.setdefault(name, x), x):
            raise AssertionError(f"the stages differ in {name}, which they share")
    return full


# --- Bytes ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that a rank made: `payload` bytes of its result, or of what was sent, in the group of that name."""

    operation: str
    payload: int
    group: str


# What each of n ranks sends for a payload of one byte, with the best algorithm: the factors of nccl-tests. Those count
# the larger side of a call; a reduce_scatter is noted with its result, the smaller one.
FACTORS = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1),
    "broadcast": lambda n: Fraction(1),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


@contextmanager
def traffic() -> Iterator[list[Call]]:
    """Note every call that this rank makes on the backend ringcomm; the list is filled at the end."""
    calls: list[Call] = []
    before = labels.enabled
    enable_profiler_labels()
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            yield calls
    finally:
        enable_profiler_labels(before)
    for event in profiler.events() or ():
        if match := re.fullmatch(r"ringcomm::(\w+) (\d+) B group (\S+)", event.name):
            calls.append(Call(match[1], int(match[2]), match[3]))


def sent(calls: Sequence[Call], axis: Axis) -> Fraction:
    """Return how many bytes these calls make this rank send to others of the axis.

    Raises:
        ArgumentError: a call whose bytes depend on more than its payload, as a gather's do on the root.
    """
    mine = [call for call in calls if call.group == axis.group.group_name]
    if others := {call.operation for call in mine} - FACTORS.keys():
        raise refuse("the calls", f"some of {', '.join(FACTORS)}", ", ".join(sorted(others)))
    return sum((call.payload * FACTORS[call.operation](axis.size) for call in mine), Fraction())


def tensor_parallel_bytes(t: int, batch: int, sequence: int, hidden: int, layers: int, itemsize: int) -> Fraction:
    """Return what a rank sends on the axis `tp` for so many transformer layers, forward and backward, in bytes.

    Two pairs of layers, each an all-reduce forward and one backward: 4 · 2(t-1)/t · b·s·h a layer; as much with
    sequence parallelism, where each all-reduce is a reduce-scatter and an all-gather (arXiv 1909.08053, 2205.05198).
    Norms split along the sequence add the sums of their own gradients, which this leaves out.
    """
    return 4 * Fraction(2 * (t - 1), t) * batch * sequence * hidden * layers * itemsize


def data_parallel_bytes(d: int, parameters: int, itemsize: int) -> Fraction:
    """Return what a rank sends on the axis `dp` in a step, in bytes: 2(d-1)/d times its parameters."""
    return Fraction(2 * (d - 1), d) * parameters * itemsize


def pipeline_bytes(boundaries: int, batch: int, sequence: int, hidden: int, itemsize: int) -> int:
    """Return what a rank sends on the axis `pp` for a batch, in bytes: b·s·h for each boundary and direction.

    `boundaries` are those over which this rank sends: forward from each of its chunks but the last stage of all,
    backward from each but the first.
    """
    return boundaries * batch * sequence * hidden * itemsize
