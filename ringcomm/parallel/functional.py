"""Collectives that gradients flow through: each with the collective that is its backward.

What flows backward through a collective is its transpose: a copy to t ranks becomes the sum of what they send back, a
concatenation becomes the slice one rank gave. So these come in pairs, one the backward of the other. The first pair are
f and g of Shoeybi et al., Megatron-LM (arXiv 1909.08053); the last pair stand in their place in Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198).

Nothing here changes its input, nor the gradient that comes in. `S` is the size of the whole tensor in bytes, t that of
the axis; "sends" is what each rank sends in a ring. On an axis of one rank all return the input itself.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.parallel.grid import Axis

__all__ = ["all_gather", "copy_to", "gather_from", "reduce_from", "reduce_scatter", "scatter_to"]

Move = Callable[[torch.Tensor], torch.Tensor]

# torch 2.13 renamed them, and warns of the names that it had.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Give every rank the same input: f.

    Forward: nothing. Backward: an all-reduce of the gradient, which sends 2 · (t-1)/t · S.
    """
    return _pair(x, axis, lambda x: x.view_as(x), lambda grad: summed(grad, axis))


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Add up what the ranks have: g.

    Forward: an all-reduce, which sends 2 · (t-1)/t · S. Backward: nothing.
    """
    return _pair(x, axis, lambda x: summed(x, axis), lambda grad: grad)


def gather_from(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Put the parts of the ranks together along `dim`, for all to go on in the same way.

    Forward: an all-gather, which sends (t-1)/t · S. Backward: nothing, each rank takes its slice.
    """
    return _pair(x, axis, lambda x: joined(x, axis, dim), lambda grad: part(grad, axis, dim))


def scatter_to(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Take this rank's part, along `dim`, of what all ranks have.

    Forward: nothing. Backward: an all-gather, which sends (t-1)/t · S.
    """
    return _pair(x, axis, lambda x: part(x, axis, dim), lambda grad: joined(grad, axis, dim))


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Put the parts of the ranks together along `dim`, for each to go on in its own way: f where parts come in.

    Forward: an all-gather, which sends (t-1)/t · S. Backward: a reduce-scatter, which sends as much.
    """
    return _pair(x, axis, lambda x: joined(x, axis, dim), lambda grad: summed_part(grad, axis, dim))


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Add up what the ranks have, and take this rank's part along `dim`: g where parts go out.

    Forward: a reduce-scatter, which sends (t-1)/t · S. Backward: an all-gather, which sends as much.
    """
    return _pair(x, axis, lambda x: summed_part(x, axis, dim), lambda grad: joined(grad, axis, dim))


# --- The same without gradients ---------------------------------------------------------------------------------------


def summed(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum over the ranks, or what `op` makes of them."""
    if axis.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=axis.group)
    return x


def part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along `dim`."""
    share = axis.share(f"the length of dimension {dim} of {tuple(x.shape)}", x.shape[dim])
    return x.narrow(dim, axis.rank * share, share).clone(memory_format=torch.contiguous_format)


def joined(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return the slices of all ranks, one after the other along `dim`."""
    if axis.size == 1:
        return x
    dim %= x.dim()
    parts = x.new_empty(axis.size, *x.shape)
    all_gather_single(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def summed_part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice, along `dim`, of the sum over the ranks."""
    dim %= x.dim()
    share = axis.share(f"the length of dimension {dim} of {tuple(x.shape)}", x.shape[dim])
    parts = x.reshape(*x.shape[:dim], axis.size, share, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    reduce_scatter_single(out, parts.flatten(0, 1), group=axis.group)
    return out


def _pair(x: torch.Tensor, axis: Axis, forward: Move, backward: Move) -> torch.Tensor:
    if axis.size == 1:
        return x
    y: torch.Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transpose(grad), None, None
