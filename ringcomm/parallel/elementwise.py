"""Whether an optimizer updates each element by itself, so that it can update a parameter piece by piece."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import refuse
from ringcomm.parallel.zero_states import ShardStates, optimized

__all__ = ["check_elementwise"]

SHAPE, HALF = (16, 16), 128  # of a matrix, and the elements of its first half


def check_elementwise(what: str, factory: Callable[[Any], Optimizer], device: torch.device) -> None:
    """Raise ArgumentError if an optimizer updates half of a matrix in another way than it does in the whole matrix.

    Adafactor, Muon and LAMB do. An optimizer that cannot be tried is accepted: `factory` may depend on the parameters.
    """
    whole = nn.Parameter(torch.linspace(-1, 2, 2 * HALF, dtype=torch.float64, device=device).view(SHAPE))
    half = _FirstHalf(nn.Parameter(whole.detach().clone()))
    try:
        optimizer, of_half = factory([whole]), factory(list(half.pieces))
        if [*optimized(optimizer)] != [whole] or [*optimized(of_half)] != [*half.pieces]:
            return
        expected = _update(optimizer, whole)[:HALF]
    except Exception:
        return
    expects = refuse(what, "one that updates each element by itself, as AdamW does", type(optimizer).__name__)
    ShardStates(of_half, [half])
    try:
        found = _update(of_half, *half.pieces.values())
    except Exception as error:  # Muon takes matrices only
        raise expects from error
    if not torch.allclose(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max())):
        raise expects


class _FirstHalf:
    """What `ShardStates` uses of a ShardBucket, with the first half of a parameter as its piece."""

    dp: Any = None

    def __init__(self, parameter: nn.Parameter) -> None:
        self.pieces = {parameter: nn.Parameter(self.cut(parameter, parameter).clone())}

    def cut(self, full: Tensor, _: Tensor) -> Tensor:
        return full.detach().reshape(-1)[:HALF]


def _update(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """Return by how much two steps with given gradients move a parameter."""
    before = parameter.detach().clone()
    for step in range(2):
        count = torch.arange(parameter.numel(), dtype=torch.float64, device=parameter.device)
        parameter.grad = (count * (step + 1)).sin().view(parameter.shape)
        optimizer.step()
    return (parameter.detach() - before).view(-1)
