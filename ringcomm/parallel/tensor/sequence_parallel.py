"""Norms and dropout of activations sharded along the sequence: sequence parallelism outside the linear layers."""

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.parallel.collectives import copy_to
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.state.seed import rank_local_rng

__all__ = ["SequenceParallelDropout", "SequenceParallelLayerNorm", "SequenceParallelRMSNorm"]


class SequenceParallelLayerNorm(nn.LayerNorm):
    """A LayerNorm of this rank's tokens: (B, S/t, H) → (B, S/t, H).

    Forward: no communication. Backward: all-reduce of the gradients of weight and bias, each a sum over these tokens.
    """

    def __init__(self, hidden: int, tp: Axis, *, eps: float = 1e-5) -> None:
        super().__init__(hidden, eps)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (copy_to(full, self.tp) for full in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceParallelRMSNorm(nn.RMSNorm):
    """An RMSNorm of this rank's tokens: (B, S/t, H) → (B, S/t, H) (Zhang and Sennrich, arXiv 1910.07467).

    Forward: no communication. Backward: all-reduce of the gradient of the weight, a sum over these tokens.
    """

    def __init__(self, hidden: int, tp: Axis, *, eps: float | None = None) -> None:
        super().__init__(hidden, eps)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, copy_to(self.weight, self.tp), self.eps)


class SequenceParallelDropout(nn.Dropout):
    """A dropout of sharded activations, with different random numbers on each rank. No communication."""

    def __init__(self, p: float, tp: Axis) -> None:
        super().__init__(p)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return x
        with rank_local_rng(self.tp, x.device):
            return super().forward(x)
