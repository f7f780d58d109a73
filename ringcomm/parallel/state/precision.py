"""Mixed precision: parameters of 16 bits, float32 master weights, dynamic loss scaling."""

from collections.abc import Callable, Mapping
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.replicas import broadcast_replicas
from ringcomm.parallel.sharding import Modules, as_list
from ringcomm.parallel.state.clip import clip_factor, grad_norm
from ringcomm.parallel.state.loss_scale import LossScale, LossScaleOptions
from ringcomm.parallel.state.offload import OffloadedOptimizer
from ringcomm.parallel.state.optimizers import create_optimizer
from ringcomm.parallel.state.training import Training, copy_to_masters

__all__ = ["MixedPrecision"]


class MixedPrecision(Training):
    """Trains modules in bfloat16 or float16 with an optimizer of float32 master weights.

    After Micikevicius et al., Mixed Precision Training (arXiv 1710.03740). Small gradients underflow in float16, so the
    loss is multiplied by a scale, which is halved when gradients overflow and doubled after `growth_interval` steps
    without overflow. In bfloat16, which has the range of float32, the scale is always 1. In float32 the masters are
    the parameters. All replicas start from the masters of the first. ::

        precision = MixedPrecision(chunks, grid, lambda masters: torch.optim.AdamW(masters, lr=1e-3), torch.bfloat16)
        (loss(model(x), y) * precision.loss_scale).backward()
        norm = precision.step(max_norm=1.0)  # None if the gradients of a rank were not finite
        precision.zero_grad()

    Args:
        chunks: this rank's modules, which are converted to `dtype`; wrap them in a DataParallel afterwards
        grid: the ranks
        optimizer: creates the optimizer for a list of parameters
        dtype: torch.float32, torch.bfloat16 or torch.float16
        init_sync: broadcast parameters and buffers from the first replica; False: the parameters are equal already
        scaling: `init_scale` and `growth_interval`, as those of a `LossScale`

    Attributes:
        parameters: the parameters of the chunks, each once
        masters: their float32 copies, in the same order; in float32, the parameters
        optimizer: the optimizer of the masters
        scale: the loss scale and its state

    Raises:
        ArgumentError: another dtype, no parameters, or `optimizer` creates none.
    """

    def __init__(
        self,
        chunks: Modules,
        grid: Grid,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        dtype: torch.dtype,
        *,
        init_sync: bool = True,
        **scaling: Unpack[LossScaleOptions],
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise refuse("dtype", "torch.float32, torch.bfloat16 or torch.float16", dtype)
        self.chunks = as_list(chunks)
        module = nn.ModuleList(self.chunks)
        if init_sync:
            broadcast_replicas(module, grid.dp_cp)
        self.parameters = list(module.parameters())
        self.masters = self.parameters
        if dtype != torch.float32:
            self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self.parameters]
        module.to(dtype)
        created = create_optimizer("optimizer", optimizer, self.masters)
        super().__init__(created, grid, LossScale(dtype, **scaling))
        self._master_of = dict(zip(self.parameters, self.masters, strict=True))
        if dtype != torch.float32 and isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.offload_parameters()

    def step(self, max_norm: float = float("inf")) -> float | None:
        """Run an optimizer step with gradients clipped to `max_norm`; return their norm, or None if it was skipped.

        All ranks skip the step if a gradient of any rank, or the norm, is not finite. Communication: an all-reduce of
        one number over all ranks, and that of `grad_norm`.
        """
        norm = grad_norm(self.chunks, self.grid) / self.loss_scale
        if self._found_inf() or not norm.isfinite():
            self.scale.update(found_inf=True)
            return None
        factor = clip_factor(norm, max_norm) / self.loss_scale
        self.copy_changes()
        for parameter, master in self._master_of.items():
            grad = parameter.grad
            master.grad = None if grad is None else (grad.float() * factor.float()).to(master.device)
        self.optimizer.step()
        self.update_parameters()
        self.scale.update(found_inf=False)
        return float(norm)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, float]:
        """Return the state of the loss scale, which a checkpoint keeps beside masters and optimizer."""
        return self.scale.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the loss scale; without effect unless both this object and the saved one are float16."""
        self.scale.load_state_dict(state)

    def copy_changes(self) -> None:
        """Copy to the masters what the program has changed in the parameters."""
        copy_to_masters(self._master_of.items())

    def held(self, parameter: nn.Parameter) -> Tensor:
        """Return the master of a parameter."""
        return self._master_of[parameter]

    def update_parameters(self) -> None:
        """Copy the masters to the parameters, and free their gradients."""
        with torch.no_grad():
            for parameter, master in self._master_of.items():
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None

    def _found_inf(self) -> bool:
        """Return whether any rank, of any replica, has a gradient that is not finite: all skip the same steps."""
        finite = [parameter.grad.isfinite().all() for parameter in self.parameters if parameter.grad is not None]
        bad = ~torch.stack(finite).all() if finite else torch.tensor(False, device=self.grid.device)
        return bool(all_reduced(bad.float(), self.grid.world, dist.ReduceOp.MAX))
