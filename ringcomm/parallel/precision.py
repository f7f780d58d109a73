"""Training in 16 bits, where an optimizer changes copies of 32 bits, or in 32."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.errors import refuse
from ringcomm.parallel.clip import clip_factor, grad_norm
from ringcomm.parallel.data import take_from_first
from ringcomm.parallel.functional import summed
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.layout import Modules, listed

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """Computes in bfloat16 or float16, and keeps float32 masters of the parameters, which the optimizer works on.

    After Micikevicius et al., Mixed Precision Training (arXiv 1710.03740). Small gradients vanish in float16, so the
    loss is multiplied by a scale that is halved when gradients overflow and doubled after `patience` good steps.
    bfloat16 has the range of float32 and needs none: there the scale stays 1. float32 needs no copies either: its
    masters are the parameters. All replicas start from the masters of the first.

        precision = MixedPrecision(chunks, grid, lambda masters: torch.optim.AdamW(masters, lr=1e-3), torch.bfloat16)
        (loss(model(x), y) * precision.scale).backward()
        norm = precision.step(max_norm=1.0)  # None if some rank's gradients were not finite
        precision.zero_grad()

    Attributes:
        parameters: those of the chunks, each once
        masters: their float32 copies, in the same order; of float32, themselves
        optimizer: what `optimizer` made of them
        scale: the number to multiply the next loss with

    Args:
        chunks: the modules of this rank, which become modules of `dtype`: before a DataParallel is made of them
        grid: the ranks of the model
        optimizer: makes an optimizer for a list of parameters
        dtype: torch.float32, torch.bfloat16 or torch.float16
        scale: the first scale of float16
        patience: how many good steps there are before the scale grows
    """

    def __init__(
        self,
        chunks: Modules,
        grid: Grid,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        dtype: torch.dtype,
        *,
        scale: float = 2.0**16,
        patience: int = 2000,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise refuse("the dtype", "torch.float32, torch.bfloat16 or torch.float16", dtype)
        self.chunks, self.grid, self.patience = listed(chunks), grid, patience
        self.parameters = list(nn.ModuleList(self.chunks).parameters())
        self.masters = self.parameters
        if dtype != torch.float32:
            self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self.parameters]
        nn.ModuleList(self.chunks).to(dtype)
        take_from_first(self.masters, grid.dp)
        self._publish()
        self.optimizer = optimizer(self.masters)
        self.scale = scale if dtype == torch.float16 else 1.0
        self._grows = dtype == torch.float16
        self._good = 0  # steps since the scale has changed

    def step(self, max_norm: float = float("inf")) -> float | None:
        """Make a step with the gradients, clipped to `max_norm`; return their norm, or None if the step was skipped.

        It is skipped on every rank if the gradients of any, or their norm, are not finite. Communication: an all-reduce
        of one number over all ranks, and that of `grad_norm`.
        """
        norm = grad_norm(self.chunks, self.grid) / self.scale
        if self._overflow() or not norm.isfinite():
            self._rescale(good=False)
            return None
        factor = clip_factor(norm, max_norm) / self.scale
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float() * factor.float()
        self.optimizer.step()
        self._publish()
        self._rescale(good=True)
        return float(norm)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, float]:
        """Return the scale and how long it has been good: what a checkpoint keeps besides masters and optimizer."""
        return {"scale": self.scale, "good": self._good} if self._grows else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the scale of a `state_dict`; one of another dtype has none, and changes nothing."""
        if self._grows and state.get("scale"):
            self.scale, self._good = state["scale"], int(state["good"])

    def _publish(self) -> None:
        """Round the masters to the parameters."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None

    def _overflow(self) -> bool:
        """Return whether any rank has a gradient that is not finite.

        All ranks are asked, not only those of one replica: replicas must never part ways.
        """
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        device = grads[0].device if grads else self.grid.device
        bad = (
            torch.stack([~grad.isfinite().all() for grad in grads]).any()
            if grads
            else torch.tensor(False, device=device)
        )
        return bool(summed(bad.float(), self.grid.world, dist.ReduceOp.MAX))

    def _rescale(self, *, good: bool) -> None:
        if not self._grows:
            return
        self._good = self._good + 1 if good else 0
        if not good:
            self.scale /= 2
        elif self._good == self.patience:
            self.scale, self._good = self.scale * 2, 0
