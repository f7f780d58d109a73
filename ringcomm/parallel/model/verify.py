"""A check for your own tests: compare every weight and gradient of a model with the same model in one process.

After the same steps with both models::

    reference = gpt_stages(config, Grid.alone(), seed=seed)
    check_model(chunks, reference, grid, 1e-10)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import collect_shard_specs, full_tensors, named_parameters

__all__ = ["KINDS", "check_model", "full_values"]

Values = Callable[[nn.Parameter], torch.Tensor | None]

KINDS: dict[str, Values] = {
    "weight": lambda parameter: parameter.detach(),
    "gradient": lambda parameter: parameter.grad,
}

# Gradients of queries can be 1e-10 of the largest, and that of a key's bias is zero in theory: larger numbers cancel
# and leave their rounding errors. With this floor no value of a small GPT on up to 8 ranks was off by more than 100
# roundings (2e-14 in float64, 9e-6 in float32); without it, by up to 10,000.
FLOOR = 1e-5


def full_values(kind: str, chunks: Sequence[nn.Module], grid: Grid) -> dict[str, torch.Tensor]:
    """Return the values of one of the KINDS in the full model by name, on every rank.

    Raises:
        AssertionError: a parameter has no gradient, or tied weights or their gradients differ.
    """
    specs = {name: spec for chunk in chunks for name, spec in collect_shard_specs(chunk).items()}
    values = full_tensors(_named(kind, chunks), specs, grid.tp)
    for axis in (grid.ep, grid.pp):  # experts, then stages
        parts: list[Any] = [None] * axis.size
        dist.all_gather_object(parts, values, group=axis.group)
        values = _merge(parts)
    return values


def check_model(chunks: Sequence[nn.Module], reference: Sequence[nn.Module], grid: Grid, tolerance: float) -> None:
    """Compare all weights and gradients of a model with those of `reference`, the same model in one process.

    A value may be off by `tolerance` · (p + 1e-5 · m), where p and m are the largest absolute values of its parameter
    and of the model. The second term covers small gradients with the rounding errors of larger terms that cancel.

    Raises:
        AssertionError: the models differ; the message names the parameter.
    """
    for kind in KINDS:
        got, expected = full_values(kind, chunks, grid), _named(kind, reference)
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


def _named(kind: str, chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return this rank's values, by name."""
    found = [{name: KINDS[kind](parameter) for name, parameter in named_parameters(chunk)} for chunk in chunks]
    if missing := [name for values in found for name, x in values.items() if x is None]:
        raise AssertionError(f"no gradient of {', '.join(missing)}")
    return _merge(found)


def _merge(parts: Sequence[Mapping[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    for name, x in (item for values in parts for item in values.items()):
        if x is not None and not torch.equal(full.setdefault(name, x), x):
            raise AssertionError(f"the ranks differ in {name}, which they all have")
    return full
