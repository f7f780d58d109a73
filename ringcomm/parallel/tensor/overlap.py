"""Linear layers at the entry of the sharded region, whose weight gradients hide the communication of backward.

Entering the region sums the gradient of its input over the ranks (all-reduce, or reduce-scatter with sequence
parallelism). Nothing in the layers depends on that sum, so their weight gradients are computed while it is under way,
as in Megatron-LM (Korthikanti et al., arXiv 2205.05198). Backward runs these nodes of the autograd graph in this order:

1. `_InputGradient` computes Σ grad · weight over the layers, and starts the communication.
2. The layers, which see a detached input, compute gradᵀ · input.
3. `_Enter` waits for the sum.

Autograd runs the node that was created last first, so `_Enter` is created before the layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.parallel.collectives import all_gathered, reduce_scatter_single
from ringcomm.parallel.grid import Axis

__all__ = ["enter_linear"]

SEQUENCE = -2  # dimension


def enter_linear(
    x: torch.Tensor,
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    weights: Sequence[torch.Tensor],
    tp: Axis,
    sequence_parallel: bool,
) -> list[torch.Tensor]:
    """Enter the sharded region, and return the outputs of linear layers there with the same input.

    Forward and backward have the bits, and send the bytes, of `layer(copy_to(x, tp))`, or with sequence parallelism of
    `layer(all_gather(x, tp, -2))`.

    Args:
        x: (B, S, H), the same on all ranks, or (B, S/t, H) with sequence parallelism
        layers: functions (B, S, H) → (B, S, out/t) that multiply by their weight, and may add a bias
        weights: (out/t, H), the weight of each
        tp: the ranks
        sequence_parallel: whether the input is sharded along the sequence
    """
    if tp.size == 1:
        return [layer(x) for layer in layers]
    total = _Sum(tp, sequence_parallel)
    x = _Enter.apply(x, total)
    outputs = [layer(x.detach()) for layer in layers]
    constants = [weight.detach() for weight in weights]
    return list(_InputGradient.apply(x, total, constants, *outputs))


class _Sum:
    """The sum of a tensor over the ranks, of which each keeps all, or its part of the sequence."""

    def __init__(self, tp: Axis, sequence_parallel: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def start(self, x: torch.Tensor) -> None:
        """Start to sum. The tensor must not be used afterwards."""
        group = self.tp.group
        if self.sequence_parallel:
            self._parts = torch.stack(x.chunk(self.tp.size, SEQUENCE))
            self._result = torch.empty_like(self._parts[0])
            self._work = reduce_scatter_single(self._result, self._parts.flatten(0, 1), group=group, async_op=True)
        else:
            self._result = x.contiguous()
            self._work = dist.all_reduce(self._result, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return all_gathered(x, total.tp, SEQUENCE) if total.sequence_parallel else x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.total.wait(), None


class _InputGradient(torch.autograd.Function):
    """Passes the outputs of linear layers on, and computes the gradient of their input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, total: _Sum, weights: list[torch.Tensor], *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        ctx.total, ctx.dtype = total, x.dtype
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x_grad = None
        if ctx.needs_input_grad[0]:
            used = [(grad, weight) for grad, weight in zip(grads, ctx.saved_tensors, strict=True) if grad is not None]
            # Under autocast the outputs and their gradients have 16 bits.
            first, *more = [(grad @ weight.to(grad.dtype)).to(ctx.dtype) for grad, weight in used]
            x_grad = sum(more, first)
            ctx.total.start(x_grad)
        return x_grad, None, None, *grads
