"""Differentiable collectives, each with the collective that is its backward.

The gradient of a collective is its transpose: the transpose of a copy to t ranks is the sum of their gradients, that of
a concatenation is each rank's slice. So the functions come in pairs, each the backward of the other. `copy_to` and
`reduce_from` are f and g of Shoeybi et al., Megatron-LM (arXiv 1909.08053); `all_gather` and `reduce_scatter` replace
them in Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198).

No function modifies its input or the incoming gradient. S is the size of the full tensor in bytes, t that of the axis;
"sends" counts the bytes each rank sends in a ring. On an axis of one rank every function returns its input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.parallel.grid import Axis

__all__ = ["all_gather", "all_to_all", "copy_to", "gather_from", "reduce_from", "reduce_scatter", "scatter_to"]

TensorFunction = Callable[[torch.Tensor], torch.Tensor]

# torch 2.13 renamed them, and warns about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Use an input that is the same on all ranks (f of Megatron-LM).

    Forward: no communication. Backward: all-reduce of the gradient, sends 2 · (t-1)/t · S.
    """
    return _apply(x, axis, lambda x: x.view_as(x), lambda grad: all_reduced(grad, axis))


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of the ranks' inputs (g of Megatron-LM).

    Forward: all-reduce, sends 2 · (t-1)/t · S. Backward: no communication.
    """
    return _apply(x, axis, lambda x: all_reduced(x, axis), lambda grad: grad)


def gather_from(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Concatenate the ranks' shards along `dim`, for a computation that all ranks repeat.

    Forward: all-gather, sends (t-1)/t · S. Backward: each rank takes its slice, no communication.
    """
    return _apply(x, axis, lambda x: all_gathered(x, axis, dim), lambda grad: local_slice(grad, axis, dim))


def scatter_to(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return this rank's slice, along `dim`, of an input that is the same on all ranks.

    Forward: no communication. Backward: all-gather, sends (t-1)/t · S.
    """
    return _apply(x, axis, lambda x: local_slice(x, axis, dim), lambda grad: all_gathered(grad, axis, dim))


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Concatenate the ranks' shards along `dim`, for a computation that differs by rank.

    Forward: all-gather, sends (t-1)/t · S. Backward: reduce-scatter, sends (t-1)/t · S.
    """
    return _apply(x, axis, lambda x: all_gathered(x, axis, dim), lambda grad: reduce_scattered(grad, axis, dim))


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice, along `dim`, of the sum of the ranks' inputs.

    Forward: reduce-scatter, sends (t-1)/t · S. Backward: all-gather, sends (t-1)/t · S.
    """
    return _apply(x, axis, lambda x: reduce_scattered(x, axis, dim), lambda grad: all_gathered(grad, axis, dim))


def all_to_all(x: torch.Tensor, axis: Axis, split: int, join: int) -> torch.Tensor:
    """Split the inputs into equal parts along one dimension, and join the parts for this rank along another.

    Forward and backward: all-to-all, sends (t-1)/t of this rank's input.
    """
    return _apply(x, axis, lambda x: exchanged(x, axis, split, join), lambda grad: exchanged(grad, axis, join, split))


def all_to_all_rows(
    x: torch.Tensor, axis: Axis, sends: list[int], receives: list[int], grad_factor: float = 1.0
) -> torch.Tensor:
    """Send `sends[r]` rows to each rank r, in order; return the `receives[r]` rows of each.

    Forward and backward: all-to-all, sends the rows for other ranks. Backward multiplies the gradient by `grad_factor`.
    """

    def transferred(x: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        received = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), receives, sends, group=axis.group)
        return received

    def backward(grad: torch.Tensor) -> torch.Tensor:
        return transferred(grad, receives, sends).mul_(grad_factor)

    return _apply(x, axis, lambda x: transferred(x, sends, receives), backward)


# --- The same without gradients ---------------------------------------------------------------------------------------


def all_reduced(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum over the ranks, or another reduction."""
    if axis.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=axis.group)
    return x


def local_slice(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along `dim`."""
    length = axis.divide(f"the length of dimension {dim} of {tuple(x.shape)}", x.shape[dim])
    return x.narrow(dim, axis.rank * length, length).clone(memory_format=torch.contiguous_format)


def all_gathered(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return the slices of all ranks, concatenated along `dim`."""
    if axis.size == 1:
        return x
    dim %= x.dim()
    parts = x.new_empty(axis.size, *x.shape)
    all_gather_single(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scattered(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice, along `dim`, of the sum over the ranks."""
    dim %= x.dim()
    length = axis.divide(f"the length of dimension {dim} of {tuple(x.shape)}", x.shape[dim])
    parts = x.reshape(*x.shape[:dim], axis.size, length, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    reduce_scatter_single(out, parts.flatten(0, 1), group=axis.group)
    return out


def exchanged(x: torch.Tensor, axis: Axis, split: int, join: int) -> torch.Tensor:
    """Return the ranks' parts along `split` for this rank, joined along `join`."""
    sent = torch.stack(x.chunk(axis.size, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return torch.cat(received.unbind(), join)


def _apply(x: torch.Tensor, axis: Axis, forward: TensorFunction, backward: TensorFunction) -> torch.Tensor:
    if axis.size == 1:
        return x
    y: torch.Tensor = _Collective.apply(x, forward, backward)
    return y


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: TensorFunction, backward: TensorFunction) -> torch.Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transpose(grad), None, None
