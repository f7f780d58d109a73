"""Gradient norm and clipping of a sharded model."""

import torch

from ringcomm.errors import refuse
from ringcomm.parallel.functional import all_reduced
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import Modules, as_list, counted_parameters

__all__ = ["clip_grad_norm", "grad_norm"]


def grad_norm(chunks: Modules, grid: Grid) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole model, on every rank.

    Replicated and tied parameters count once. Gradients must be final: averaged over `dp`, tied ones summed. Each norm
    is computed in float32 (float64 for float64), and they are combined in float64.

    Communication: all-reduce of one number over tp × pp.
    """
    grads = [parameter.grad for parameter in counted_parameters(chunks, grid.tp) if parameter.grad is not None]
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).double() for grad in grads
    ]
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=grid.device)
    return all_reduced(squares, grid.model).sqrt()


def clip_grad_norm(chunks: Modules, grid: Grid, max_norm: float) -> torch.Tensor:
    """Scale the gradients to norm `max_norm` if theirs is larger, and return their norm before.

    The counterpart of `torch.nn.utils.clip_grad_norm_`. Communication: that of `grad_norm`.

    Raises:
        ArgumentError: `max_norm` is negative or nan.
    """
    chunks = as_list(chunks)
    norm = grad_norm(chunks, grid)
    factor = clip_factor(norm, max_norm)
    for parameter in {parameter for chunk in chunks for parameter in chunk.parameters()}:
        if parameter.grad is not None:
            # The factor itself may underflow in 16 bits.
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)
            parameter.grad.copy_(parameter.grad.to(wide) * factor.to(wide))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor for gradients of this norm."""
    if not max_norm >= 0:
        raise refuse("max_norm", "at least 0", max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
