"""Gradients of parameters: their dtype, and which of them a replica used."""

from collections.abc import Iterable

import torch

from ringcomm.errors import refuse

__all__ = [
    *("check_grad_dtype", "grad_dtype", "mark_unused", "mark_used", "refuse_sparse", "set_grad_dtype", "was_used"),
]


def refuse_sparse(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise refuse(f"gradient of a parameter of shape {tuple(parameter.shape)}", "a dense one", "a sparse one")


# A replica that did not use a parameter sends -0.0 for its gradient, and the sum is -0.0 only if all replicas did. So
# the first element tells whether any of them used it, at no cost in bytes, and only a replica that did not looks.


def mark_unused(grad: torch.Tensor) -> None:
    """Set the gradient of a parameter that this replica did not use."""
    grad.fill_(-0.0)


def mark_used(grad: torch.Tensor) -> None:
    """Distinguish a gradient from that of an unused parameter."""
    grad.view(-1)[:1].add_(0.0)  # -0.0 + 0.0 is 0.0


def was_used(total: torch.Tensor) -> bool:
    """Return whether any replica used a parameter, given the sum of their gradients."""
    first = total.view(-1)[:1]
    return not bool(((first == 0) & first.signbit()).all())


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def set_grad_dtype(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Let autograd accumulate the gradients of the parameters in this dtype; convert those they have."""
    check_grad_dtype(dtype)
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if grad is None else grad.to(dtype)


def check_grad_dtype(dtype: torch.dtype) -> None:
    """Raise ArgumentError if gradients cannot have this dtype."""
    if not dtype.is_floating_point:
        raise refuse("grad_dtype", "a floating-point dtype", dtype)
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise refuse("grad_dtype", f"None with torch {torch.__version__}, which has no Tensor.grad_dtype", dtype)
