"""Pipeline parallelism: stages of a model on different ranks, and micro-batches that run through them.

Who does what when is the table of a Schedule; this file carries it out. Gradients have the bits of one process that
takes the micro-batches one by one, whatever the schedule: every stage adds them in that order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import ArgumentError, refuse
from ringcomm.parallel.data import DataParallel
from ringcomm.parallel.functional import summed
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.layout import Modules, listed
from ringcomm.parallel.mail import Format, Mail
from ringcomm.parallel.schedule import FORWARD, Action, Message, Schedule, Span, messages, validate

__all__ = ["Pipeline"]


class Pipeline:
    """The stages of this rank, and what it takes to train them together with those of the other ranks.

    A stage is a module that takes one tensor and returns one. Chunk c of rank r is stage c · pp + r. What the last
    stage returns goes to `loss_fn`.

    For a batch of m micro-batches of b rows, each s · h elements where they pass a boundary, every boundary between two
    ranks carries m messages of b · s · h elements forward, and as many backward. The loss is broadcast, and averaged
    over the replicas (8 bytes each), and tied gradients are all-reduced.

    Args:
        grid: its axis `pp` has the ranks of the pipeline
        chunks: the stages of this rank
        schedule: what is done in which order
        loss_fn: (output, target) → loss, the mean over the rows that it is given
        replicas: averages the gradients of the chunks over `grid.dp`, while the last micro-batches go backward
        tied: parameters that are copies of one, each with the group of the ranks that have a copy: all get the sum of
            their gradients. They must be equal at the start, and are then for ever.
        recompute: keep only the input of a stage until its backward, and run it forward once more then (Chen et al.,
            Training Deep Nets with Sublinear Memory Cost, 2016); a BatchNorm counts each batch twice so

    Attributes:
        device: that of the first parameter here, or of the grid; what comes from other stages goes there
        trace: what this rank did in the last run, when, in seconds from its start (of a GPU: when it was launched)

    Raises:
        ArgumentError: the schedule does not train, or is for another number of ranks or chunks.
    """

    def __init__(
        self,
        grid: Grid,
        chunks: Modules,
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        replicas: DataParallel | None = None,
        tied: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        recompute: bool = False,
    ) -> None:
        if schedule.ranks != grid.pp.size:
            raise refuse("ranks of the schedule", f"those of the pipeline, {grid.pp.size}", schedule.ranks)
        chunks = listed(chunks)
        if schedule.chunks != len(chunks):
            raise refuse("chunks of this rank", f"those of the schedule, {schedule.chunks}", len(chunks))
        validate(schedule)
        self.grid, self.axis = grid, grid.pp
        self.chunks = chunks
        self.schedule = schedule
        self.loss_fn = loss_fn
        self.replicas = replicas
        self.tied = list(tied)
        self.recompute = recompute
        self.trace: list[Span] = []
        self._training = _part(schedule, self.axis.rank)
        self._evaluating = _part(schedule.forward_only(), self.axis.rank)
        self._formats: dict[Any, dict[int, Format]] = {}  # of the boundaries, by the shape of micro-batches
        parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
        self.device = next((parameter.device for parameter in parameters), grid.device)

    def step(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Run a batch forward and backward, add to the gradients, and return the loss, on every rank.

        The batch is cut along axis 0 into micro-batches of equal length; loss and gradients are the mean over them, and
        over the batches of all replicas. Every rank passes tensors of the same shapes. Only the first stage reads the
        inputs, and the last one the targets: the others may pass tensors on the device `meta`. Gradients, but not the
        loss, are multiplied by `scale`, which those of 16 bits may need.

        Raises:
            ArgumentError: the batch cannot be cut evenly, or gradients are switched off: nothing is sent then, and
                ranks with another batch wait for this one; or a stage returns what cannot be sent
            PeerLost, CollectiveTimeout: another rank died or did not come (from the backend ringcomm)
            Aborted: a stage of another rank raised an error (from the backend ringcomm); nobody can go on then
        """
        if not torch.is_grad_enabled():
            raise ArgumentError("step goes backward, which no_grad forbids: call evaluate")
        batch = self._batch(inputs, targets, scale)
        with self._nobody_waiting():
            for parameter, group in self.tied:
                if dist.get_rank(group) > 0:
                    parameter.grad = None  # what has been summed before counts once
            self._carry_out(*self._training, batch)
            if self.replicas:
                self.replicas.finish()
            for parameter, group in self.tied:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
            return self._everywhere(batch.loss)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run a batch forward only, and return the loss, on every rank. All else is as for `step`.

        Modules stay in the mode that they are in: call their `eval` before, if they drop anything.
        """
        batch = self._batch(inputs, targets)
        with self._nobody_waiting():
            self._carry_out(*self._evaluating, batch)
            return self._everywhere(batch.loss)

    @contextmanager
    def _nobody_waiting(self) -> Iterator[None]:
        """Let the others know if this rank fails inside: they wait for what does not come any more."""
        try:
            yield
        except BaseException:
            self.grid.abort()
            raise

    def _batch(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> "_Batch":
        x, y = self._cut("inputs", inputs), self._cut("targets", targets)
        if len(x[0]) != len(y[0]):
            raise refuse("rows of the targets", f"those of the inputs, {len(inputs)}", len(targets))
        return _Batch(self, x, y, scale)

    def _everywhere(self, loss: Tensor) -> Tensor:
        """Return the loss that the last stage knows, averaged over the replicas."""
        if self.axis.size > 1:
            dist.broadcast(loss, self.axis.ranks[-1], group=self.axis.group)
        return summed(loss, self.grid.dp) / self.grid.dp.size if self.replicas else loss

    def _carry_out(self, row: Sequence[Action], order: Sequence[Message], batch: "_Batch") -> None:
        rank, schedule = self.axis.rank, self.schedule
        formats = self._formats.setdefault((batch.inputs[0].shape, batch.inputs[0].dtype), {})
        mail = Mail(self.axis, schedule, order, formats, self.device)
        self.trace = []
        start = perf_counter()
        for action in row:
            needed, given = schedule.needs(rank, action), schedule.gives(rank, action)
            arrived = None if needed is None else mail.receive(needed)
            begin = perf_counter()
            result = (batch.forward if action.work == FORWARD else batch.backward)(action, arrived)
            self.trace.append(Span(action, begin - start, perf_counter() - start))
            if given is not None:
                if result is None:
                    stage = schedule.stage(rank, action.chunk)
                    raise ArgumentError(f"stage {stage}: what it returns does not depend on what it is given")
                mail.send(given, result)
        mail.close()

    def _cut(self, what: str, batch: Tensor) -> tuple[Tensor, ...]:
        rows, parts = batch.shape[0] if batch.dim() else 0, self.schedule.micro_batches
        if rows == 0 or rows % parts:
            raise refuse(f"rows of the {what}, for {parts} micro-batches", f"a multiple of {parts}", rows)
        return torch.split(batch, rows // parts)


def _part(schedule: Schedule, rank: int) -> tuple[Sequence[Action], list[Message]]:
    """Return what a rank does, and what it sends and receives, in order."""
    return schedule.table[rank], [each for each in messages(schedule) if rank in schedule.ends(each)]


class _Batch:
    """One batch on its way through the stages of this rank."""

    def __init__(
        self, pipeline: Pipeline, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], scale: float
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self._pipeline, self._scale = pipeline, scale
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what went into a chunk, and what came out

    def forward(self, action: Action, arrived: Tensor | None) -> Tensor:
        """Return what a stage makes of what has arrived; of the last one, the loss."""
        pipeline, training = self._pipeline, torch.is_grad_enabled()
        chunk = pipeline.chunks[action.chunk]
        x = self.inputs[action.micro_batch] if arrived is None else arrived.requires_grad_(training)
        recompute = pipeline.recompute and training
        stage = pipeline.schedule.stage(pipeline.axis.rank, action.chunk)
        y: Tensor = checkpoint(chunk, x, use_reentrant=False) if recompute else chunk(x)
        if not isinstance(y, Tensor):
            raise refuse(f"what stage {stage} returns", "one tensor", type(y).__name__)
        if stage == pipeline.schedule.stages - 1:
            y = pipeline.loss_fn(y, self.targets[action.micro_batch]) / pipeline.schedule.micro_batches
            if y.dim():
                raise refuse("the shape of what loss_fn returns", (), tuple(y.shape))
            self.loss = self.loss + y.detach().to(self.loss)
            y = y * self._scale
        if training:
            self._held[action.micro_batch, action.chunk] = x, y
        return y.detach()

    def backward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        """Return the gradient of what a stage was given, from that of what it made."""
        x, y = self._held.pop((action.micro_batch, action.chunk))
        replicas, last = self._pipeline.replicas, action.micro_batch == len(self.inputs) - 1
        with replicas.no_sync() if replicas and not last else nullcontext():
            if y.requires_grad:  # else the stages so far are frozen
                torch.autograd.backward(y, arrived)
        return x.grad if x.is_leaf else None
