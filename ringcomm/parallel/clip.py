"""The norm of all gradients of a model, wherever its parts are."""

import torch

from ringcomm.errors import refuse
from ringcomm.parallel.functional import summed
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.layout import Modules, counted, listed

__all__ = ["clip_grad_norm", "grad_norm"]


def grad_norm(chunks: Modules, grid: Grid) -> torch.Tensor:
    """Return the Euclidean norm of the gradients of the whole model, on every rank.

    Each number counts once: what the ranks of `tp` all have, and tied weights, on the first rank that has it. So the
    gradients must be final: averaged over `dp`, tied ones summed. The norm of each is made in float32, of float64 in
    float64, in which they are put together.

    Communication: an all-reduce of one number over tp × pp.
    """
    grads = [parameter.grad for parameter in counted(chunks, grid.tp) if parameter.grad is not None]
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).double() for grad in grads
    ]
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=grid.device)
    return summed(squares, grid.model).sqrt()


def clip_grad_norm(chunks: Modules, grid: Grid, max_norm: float) -> torch.Tensor:
    """Scale all gradients down so that their norm is `max_norm`, if it is larger; return the norm they had.

    As `torch.nn.utils.clip_grad_norm_` does for one process. Communication: that of `grad_norm`.

    Raises:
        ArgumentError: `max_norm` is not a number from 0.
    """
    chunks = listed(chunks)
    norm = grad_norm(chunks, grid)
    factor = clip_factor(norm, max_norm)
    for parameter in {parameter for chunk in chunks for parameter in chunk.parameters()}:
        if parameter.grad is not None:
            # In 16 bits the factor itself may be 0.
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)
            parameter.grad.copy_(parameter.grad.to(wide) * factor.to(wide))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are multiplied by."""
    if not max_norm >= 0:
        raise refuse("max_norm", "a number from 0", max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
