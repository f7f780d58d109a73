"""An optimizer, and what it has in place of the parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import ShardSpec, as_dtensor
from ringcomm.parallel.state.loss_scale import LossScale

__all__ = ["Training", "copy_to_masters"]


class Training:
    """An optimizer of the parameters themselves; a subclass gives it masters, or shards.

    Attributes:
        optimizer: the optimizer
        scale: the loss scale and its state
    """

    def __init__(self, optimizer: Optimizer, grid: Grid, scale: LossScale | None = None) -> None:
        self.optimizer, self.grid, self.scale = optimizer, grid, scale or LossScale()

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss, which `step` divides the gradients by."""
        return self.scale.value

    def held(self, parameter: nn.Parameter) -> Tensor:
        """Return what the optimizer has for a parameter: here the parameter."""
        return parameter

    def part(self, x: Tensor, parameter: nn.Parameter, spec: ShardSpec | None) -> Tensor:  # noqa: ARG002 (others need the parameter)
        """Return what is held of a parameter, or a state of that shape, as torch.distributed.checkpoint takes it."""
        return as_dtensor(x, spec, self.grid.tp)

    def copy_changes(self) -> None:
        """Copy to what is held what the program has changed in the parameters."""

    def update_parameters(self) -> None:
        """Give the parameters the values of what is held. All replicas call it."""


def copy_to_masters(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each master the elements of its parameter that are no longer what the master rounds to.

    A program may load weights, clamp or average them after the masters were made; only their values tell, as `data`
    counts no versions.
    """
    with torch.no_grad():
        values = [(parameter.detach(), master.detach()) for parameter, master in pairs if parameter is not master]
        changed = [parameter.ne(master.to(parameter)).any() for parameter, master in values]
        found = torch.stack(changed).tolist() if changed else []  # which waits for a GPU once
        for (parameter, master), any_changed in zip(values, found, strict=True):
            if any_changed:
                rounded, wide = master.to(parameter), master.to(parameter.device)
                master.copy_(torch.where(parameter.ne(rounded), parameter.to(wide.dtype), wide))
