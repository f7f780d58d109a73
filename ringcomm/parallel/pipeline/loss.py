"""Losses that count their targets, so that micro-batches and replicas are weighted by them."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch

from ringcomm.errors import refuse

__all__ = ["CountedLoss", "count_targets"]


def count_targets(targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the number of targets that cross-entropy does not ignore."""
    return (targets != ignore_index).sum()


@dataclass(frozen=True)
class CountedLoss:
    """A loss function that averages over some of the targets, and counts them.

    A `Pipeline` weights micro-batches and replicas by the counts, so that its loss and gradients are those of the mean
    over all counted targets of a batch, however they are divided. ::

        Pipeline(grid, chunks, schedule, CountedLoss(cross_entropy, count_targets))

    Args:
        function: (output, target) → scalar loss, the mean over the counted targets
        count: target → their number

    Raises:
        ArgumentError: `function` or `count` is not callable.
    """

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    count: Callable[[torch.Tensor], torch.Tensor]

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            if not callable(given):
                raise refuse(f"{name} of a CountedLoss", "a function", repr(given))

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.function(output, target)

    def counted(self, target: torch.Tensor) -> torch.Tensor:
        """Return the number of counted targets as a tensor."""
        found = self.count(target)
        if not isinstance(found, Real | torch.Tensor):
            raise refuse("count of a CountedLoss", "one that returns a number or a tensor", repr(found))
        return torch.as_tensor(found)
