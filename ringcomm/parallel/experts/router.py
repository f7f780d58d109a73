"""The choice of experts for tokens, and the loss that balances it (T tokens, E experts, k choices of a token)."""

from math import ceil
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_loss", "balance_loss", "by_expert", "choose"]


def choose(probabilities: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the gates and the experts of all tokens, both (k, T), first choices first: (T, E) → (k, T).

    The gate of a single choice is its probability, as in Switch Transformers; gates of several are their probabilities
    divided by their sum, as in GShard.
    """
    gates, chosen = probabilities.topk(top_k)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates.t(), chosen.t()


def balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return E · Σ_e f_e · P_e, where f_e is the part of choices that fell on e, and P_e its mean probability."""
    experts = probabilities.shape[-1]
    used = chosen.flatten().bincount(minlength=experts).to(probabilities.dtype) / chosen.numel()
    return experts * (used * probabilities.mean(0)).sum()


def by_expert(chosen: Tensor, experts: int, capacity_factor: float | None) -> tuple[Tensor, Tensor]:
    """Return the indices of the choices in the order of their experts, and the number of them for each expert.

    Choices beyond the capacity of an expert are left out, the last ones first.
    """
    order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=experts)
    if capacity_factor is not None:
        capacity = ceil(capacity_factor * len(chosen) / experts)
        first = (counts.cumsum(0) - counts)[chosen[order]]
        order = order[torch.arange(len(order), device=order.device) - first < capacity]
        counts = counts.clamp(max=capacity)
    return order, counts


def add_loss(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    """Return a tensor as it is, and add factor · loss to the loss whose backward runs."""
    y: Tensor = _AddLoss.apply(x, loss, factor)
    return y


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:  # noqa: ARG004 (only backward needs it)
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.new_full((), ctx.factor), None
