"""One batch in the stages of a rank: the forwards and backwards of its micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import refuse
from ringcomm.parallel.data.gradient_sync import GradientSync
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.pipeline.split_backward import backward_input
from ringcomm.pipelining.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, PipelineSchedule

__all__ = ["Batch"]


class RankStages(Protocol):
    """What a batch needs of a Pipeline."""

    axis: Axis
    chunks: list[nn.Module]
    schedule: PipelineSchedule
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    data_parallel: GradientSync | None
    recompute: bool
    device: torch.device


class Batch:
    """The state of one batch in the stages of this rank. Its loss is the sum of its micro-batches', over `divisors`."""

    def __init__(
        self,
        pipeline: RankStages,
        inputs: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
        divisors: Sequence[Tensor | float],  # tensors, if some may be infinite: of micro-batches that do not count
        loss_scale: float = 1.0,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self._pipeline, self._divisors, self._loss_scale = pipeline, divisors, loss_scale
        # Input of each pending backward, and where it begins: not the output, which nothing needs any more. No gradient
        # edge if all stages up to here are frozen.
        self._saved: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = {}
        self._weights: dict[tuple[int, int], Callable[[], None]] = {}  # the pending backwards for weights
        self.run: dict[str, Callable[[Action, Tensor | None], Tensor | None]] = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }

    def forward(self, action: Action, received: Tensor | None) -> Tensor:
        """Return a stage's output; of the last stage, the loss."""
        pipeline, training = self._pipeline, torch.is_grad_enabled()
        chunk = pipeline.chunks[action.chunk]
        x = self.inputs[action.micro_batch] if received is None else received.requires_grad_(training)
        recompute = pipeline.recompute and training
        stage = pipeline.schedule.stage(pipeline.axis.rank, action.chunk)
        y: Tensor = checkpoint(chunk, x, use_reentrant=False) if recompute else chunk(x)
        if not isinstance(y, Tensor):
            raise refuse(f"output of stage {stage}", "one tensor", type(y).__name__)
        if stage == pipeline.schedule.stages - 1:
            y = pipeline.loss_fn(y, self.targets[action.micro_batch])
            if y.dim():
                raise refuse("shape of the result of loss_fn", (), tuple(y.shape))
            divisor = self._divisors[action.micro_batch]
            if isinstance(divisor, Tensor):
                y, divisor = torch.where(divisor.isfinite(), y, 0), divisor.to(y.dtype)
            y = y / divisor
            self.loss = self.loss + y.detach().to(self.loss)
            y = y * self._loss_scale
        if training:
            self._saved[action.micro_batch, action.chunk] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Return the gradient of a stage's input, given that of its output."""
        x, edge = self._saved.pop((action.micro_batch, action.chunk))
        with self._sync(action):
            if edge:
                torch.autograd.backward([edge], [received])
        return x.grad if x.is_leaf else None

    def backward_input(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Return the gradient of a stage's input, and leave those of its weights to `backward_weight`."""
        x, edge = self._saved.pop((action.micro_batch, action.chunk))
        if edge is None:
            return None
        grad, self._weights[action.micro_batch, action.chunk] = backward_input(edge, x, received)
        return grad

    def backward_weight(self, action: Action, _: Tensor | None) -> None:
        """Add the gradients of a stage's weights."""
        add_gradients = self._weights.pop((action.micro_batch, action.chunk), None)
        with self._sync(action):
            if add_gradients:
                add_gradients()

    def _sync(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which gradients are averaged only in the last micro-batch."""
        data_parallel, last = self._pipeline.data_parallel, action.micro_batch == len(self.inputs) - 1
        return data_parallel.no_sync() if data_parallel and not last else nullcontext()
