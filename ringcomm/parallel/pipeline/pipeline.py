"""Pipeline parallelism: stages of a model on different ranks, and micro-batches that run through them.

A `PipelineSchedule` fixes the order of actions; this file executes it. With any schedule, gradients have the bits of
one process that runs the micro-batches one by one, because every stage adds them in that order.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.errors import ArgumentError, refuse
from ringcomm.layout_rules import check
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.data.gradient_sync import GradientSync
from ringcomm.parallel.data.gradients import grad_dtype
from ringcomm.parallel.experts.layer import set_loss_factor
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.pipeline.batch import Batch
from ringcomm.parallel.pipeline.loss import CountedLoss
from ringcomm.parallel.pipeline.p2p import P2PCommunicator, TensorMeta
from ringcomm.parallel.sharding import Modules, as_list, local_part, named_shards
from ringcomm.pipelining.schedule import Action, P2PTransfer, PipelineSchedule
from ringcomm.pipelining.simulation import Span, transfers, validate

__all__ = ["Pipeline"]


class Pipeline:
    """Trains and evaluates a model whose stages are on the ranks of `grid.pp`.

    A stage is a module with one input tensor and one output tensor. Chunk c of rank r is stage `schedule.stage(r, c)`.
    The output of the last stage goes to `loss_fn`.

    Communication: let a batch have m micro-batches of b rows, of s · h elements each at a boundary. Every boundary
    between two ranks carries m messages of b · s · h elements forward and m backward. The loss is broadcast, and
    averaged over the replicas (8 bytes each, 16 in an evaluation); in the last stage, the counts of a `CountedLoss` are
    all-reduced (8 bytes). Gradients of tied parameters are all-reduced.

    Between its forward and its backward a stage keeps its input and what autograd saves, but not its output. Chunks may
    be wrapped in torch's `fully_shard` over `grid.mesh["dp"]`, which takes the place of `data_parallel`. Schedules that
    split backward, zb-h1 and zbv, exclude `fully_shard` and `recompute`; a stage that recomputes activations by itself
    would repeat its forward for every weight.

    Args:
        grid: the ranks
        chunks: this rank's stages
        schedule: the order of forwards and backwards
        loss_fn: (output, target) → scalar loss, the mean over the rows of a micro-batch; a `CountedLoss` if it leaves
            some targets out
        data_parallel: a DataParallel or ShardedOptimizer, which averages the gradients of the chunks over `grid.dp_cp`
            during the last backward of each chunk, or its last backward for weights
        tied: copies of one parameter, each with the process group of the ranks that have a copy. All copies get the sum
            of their gradients; they stay equal if they are equal at the start. A ShardedOptimizer takes them instead.
        recompute: keep only the input of a stage until its backward, which then repeats the forward (Chen et al.,
            Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174). A BatchNorm counts each batch twice.
        scatter_gather: each of the t ranks of `grid.tp` sends 1/t of each message, and the receivers gather the parts
            on `grid.tp`, which sends (t-1)/t (Narayanan et al., arXiv 2104.04473, section 4.1). For messages that are
            the same on all these ranks; with sequence parallelism they are sharded already.

    Attributes:
        device: device of received tensors: that of this rank's first parameter, or `grid.device`
        trace: actions of the last run with their times, in seconds from its start (on a GPU: time of launch)

    Raises:
        ArgumentError: the schedule does not train, has another number of ranks or chunks, or splits backward where that
            is excluded; or `data_parallel` averages over other ranks. All ranks raise.
    """

    def __init__(
        self,
        grid: Grid,
        chunks: Modules,
        schedule: PipelineSchedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        data_parallel: GradientSync | None = None,
        tied: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        recompute: bool = False,
        scatter_gather: bool = False,
    ) -> None:
        chunks, tied = as_list(chunks), list(tied)
        parameters = list(nn.ModuleList(chunks).parameters())
        with grid.raise_on_all():
            if schedule.ranks != grid.pp.size:
                raise refuse("ranks of the schedule", f"those of the pipeline, {grid.pp.size}", schedule.ranks)
            if schedule.chunks != len(chunks):
                raise refuse("chunks of this rank", f"those of the schedule, {schedule.chunks}", len(chunks))
            validate(schedule)
            computed_again = "full" if recompute else "none"
            check(schedule=schedule.name, split_backward=schedule.splits_backward, recompute=computed_again)
            if schedule.splits_backward and any(isinstance(each, DTensor) for each in parameters):
                raise refuse(f"parameters with {schedule.name}", "tensors, because it splits backward", "DTensors")
            if data_parallel and data_parallel.dp.ranks != grid.dp_cp.ranks:
                raise refuse("data_parallel", f"one over dp_cp, ranks {grid.dp_cp.ranks}", data_parallel.dp)
        self._untied = ""  # why no step is possible; evaluation needs no sums of gradients
        try:
            with grid.raise_on_all():
                _check_tied(chunks, tied, data_parallel)
        except ArgumentError as error:
            self._untied = str(error)
        self.grid, self.axis = grid, grid.pp
        self.chunks, self.schedule, self.loss_fn = chunks, schedule, loss_fn
        self.data_parallel, self.tied, self.recompute = data_parallel, tied, recompute
        self.trace: list[Span] = []
        self._scattered = grid.tp if scatter_gather and grid.tp.size > 1 else None
        self._training = _rank_order(schedule, self.axis.rank)
        # By the number of micro-batches.
        self._evaluation = cache(lambda count: _rank_order(schedule.forward_only(count), grid.pp.rank))
        self._metadata: dict[torch.Size, dict[int, TensorMeta]] = {}  # of the boundaries, by shape of micro-batches
        self.device = next((parameter.device for parameter in parameters), grid.device)

    def step(self, inputs: Tensor, targets: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Run forward and backward on a batch, and return the loss on every rank.

        The batch is split along dimension 0 into equal micro-batches. Loss and gradients are means over the
        micro-batches, and over the batches of all replicas; with a `CountedLoss`, over the counted targets of all of
        them. Gradients are added to `grad`.

        Args:
            inputs: read by the first stage only; other ranks pass a tensor of the same shape, which may be on `meta`
            targets: read by the last stage only, as above
            loss_scale: multiplies the gradients but not the returned loss; for float16

        Raises:
            ArgumentError: a tied copy is missing on any rank; the batch cannot be split evenly or gradients are
                disabled, and nothing is sent (ranks with a valid batch wait for this one); or a stage's output cannot
                be sent, or has another dtype or shape than before for micro-batches of this shape.
            PeerLost, CollectiveTimeout, Aborted: another rank died, did not arrive in time, or its stage raised
                (backend ringcomm). The groups of the grid are broken.
        """
        if not torch.is_grad_enabled():
            raise ArgumentError("step runs backward, which no_grad disables: call evaluate")
        if self._untied:
            raise ArgumentError(self._untied)
        rows, parts = _rows(inputs, targets), self.schedule.micro_batches
        if rows == 0 or rows % parts:
            raise refuse(f"rows of the batch, for {parts} micro-batches", f"a multiple of {parts}", rows)
        x, y = (torch.split(each, rows // parts) for each in (inputs, targets))
        set_loss_factor(self.chunks, loss_scale / parts)
        with self.grid.abort_on_error():
            divisors: Sequence[Tensor | float] = [parts] * parts
            if isinstance(self.loss_fn, CountedLoss) and self._is_last:
                counts = self._counts(y)
                replicas = self.grid.dp_cp
                divisors = [*(all_reduced(counts.sum(), replicas) / (counts * replicas.size))]
            batch = Batch(self, x, y, divisors, loss_scale)
            for parameter, group in self.tied:
                if dist.get_rank(group) > 0:
                    parameter.grad = None  # the sum of earlier steps counts once
            self._run(*self._training, batch)
            if self.data_parallel:
                self.data_parallel.finish_grad_sync()
            for parameter, group in self.tied:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
                    dist.all_reduce(local_part(parameter.grad), group=group)
            return all_reduced(self._broadcast(batch.loss), self.grid.dp_cp) / self.grid.dp_cp.size

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward on a batch, and return the mean loss of its rows, or of its counted targets, on every rank.

        Arguments and errors are those of `step`, except that the batch may have any number of rows, other replicas may
        have others, and a replica may have none; without any row, the loss is nan. So the last batch of a dataset may
        be smaller. The modules stay in training mode unless you call their `eval`.
        """
        rows = _rows(inputs, targets)
        size = max(1, -(-rows // self.schedule.micro_batches))  # of a micro-batch
        even = rows - rows % size
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.grid.abort_on_error():
            (count,) = self._counts([targets])
            # The shapes within a run are equal, so a smaller last micro-batch runs alone.
            for part in (slice(even), slice(even, rows)):
                x, y = (torch.split(each[part], size) for each in (inputs, targets))
                if len(x[0]):
                    counts = self._counts(y)
                    batch = Batch(self, x, y, [*torch.where(counts > 0, count / counts, torch.inf)])
                    self._run(*self._evaluation(len(x)), batch)
                    loss += batch.loss
            total = torch.stack([loss * count, count])
            summed = all_reduced(self._broadcast(total), self.grid.dp_cp)
            return summed[0] / summed[1]

    @property
    def _is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.schedule.rank(self.schedule.stages - 1) == self.axis.rank

    def _counts(self, targets: Sequence[Tensor]) -> Tensor:
        """Return over how many targets the loss of each micro-batch is averaged; which counts in the last stage."""
        if isinstance(self.loss_fn, CountedLoss) and self._is_last:
            counts = [self.loss_fn.counted(each) for each in targets]
        else:
            counts = [torch.tensor(len(each)) for each in targets]
        return torch.stack(counts).to(self.device, torch.float64)

    def _broadcast(self, loss: Tensor) -> Tensor:
        """Return the loss of the last stage."""
        if self.axis.size > 1:
            last = self.schedule.rank(self.schedule.stages - 1)
            dist.broadcast(loss, self.axis.ranks[last], group=self.axis.group)
        return loss

    def _run(self, row: Sequence[Action], order: Sequence[P2PTransfer], batch: Batch) -> None:
        rank, schedule = self.axis.rank, self.schedule
        metadata = self._metadata.setdefault(batch.inputs[0].shape, {})  # the dtype is known to the first stage only
        p2p = P2PCommunicator(self.axis, schedule, order, metadata, self.device, self._scattered)
        self.trace = []
        start = perf_counter()
        for action in row:
            source, destination = schedule.input_of(rank, action), schedule.output_of(rank, action)
            received = p2p.recv(source) if source else None
            begin = perf_counter()
            result = batch.run[action.phase](action, received)
            self.trace.append(Span(action, begin - start, perf_counter() - start))
            if destination:
                if result is None:
                    stage = schedule.stage(rank, action.chunk)
                    raise ArgumentError(f"stage {stage}: its output does not depend on its input")
                p2p.send(destination, result)
        p2p.wait_sends()


def _check_tied(
    chunks: Sequence[nn.Module],
    tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
    data_parallel: GradientSync | None,
) -> None:
    """Raise ArgumentError if nothing sums the gradients of a tied copy."""
    given = {parameter for parameter, _ in tied}
    taken = given if data_parallel is None or data_parallel.tied is None else data_parallel.tied
    copies = {each.parameter for each in named_shards(chunks) if each.is_copy and each.parameter.requires_grad}
    if missing := (copies | given) - taken:
        taker = "Pipeline" if taken is given else "ShardedOptimizer"
        raise refuse(f"tied of the {taker}", "all copies, as of gpt_tied_weights", f"{len(missing)} fewer")


def _rows(inputs: Tensor, targets: Tensor) -> int:
    """Return the number of rows of a batch."""
    for what, batch in (("inputs", inputs), ("targets", targets)):
        if not isinstance(batch, Tensor):
            raise refuse(what, "a tensor", f"a {type(batch).__name__}")
        if not batch.dim():
            raise refuse(f"shape of the {what}", "at least one dimension", ())
    if len(inputs) != len(targets):
        raise refuse("rows of the targets", f"those of the inputs, {len(inputs)}", len(targets))
    return len(inputs)


def _rank_order(schedule: PipelineSchedule, rank: int) -> tuple[Sequence[Action], list[P2PTransfer]]:
    """Return a rank's actions and transfers, in order."""
    return schedule.table[rank], [each for each in transfers(schedule) if rank in schedule.endpoints(each)]
