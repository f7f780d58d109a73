"""ZeRO, stages 1 and 2: each replica keeps a shard of the optimizer states, and of the gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import ArgumentError, integer, refuse
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.data.buckets import BUCKET_BYTES, kind, partition_by_axis
from ringcomm.parallel.data.gradient_sync import GradientSync, refuse_synchronized
from ringcomm.parallel.data.gradients import check_grad_dtype, set_grad_dtype
from ringcomm.parallel.data.zero.checkpoint_parts import part_of
from ringcomm.parallel.data.zero.full_states import ShardStates
from ringcomm.parallel.data.zero.gradients import BufferPool, GradientShard
from ringcomm.parallel.data.zero.parameters import ParameterGathers, ParameterShard
from ringcomm.parallel.data.zero.partition import Partition
from ringcomm.parallel.data.zero.sharded_states import create_states, load_sharded_states, sharded_states
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.replicas import broadcast_replicas, check_replicas
from ringcomm.parallel.sharding import Modules, ShardSpec, as_dtensor, as_list, counted_parameters
from ringcomm.parallel.state.clip import clip_factor, local_norm
from ringcomm.parallel.state.elementwise import check_elementwise
from ringcomm.parallel.state.loss_scale import LossScale, LossScaleOptions
from ringcomm.parallel.state.offload import OffloadedOptimizer
from ringcomm.parallel.state.optimizers import create_optimizer, optimized
from ringcomm.parallel.state.training import Training, copy_to_masters

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(GradientSync, Training):
    """Averages gradients over the replicas and updates the parameters, each replica its shard of them.

    After Rajbhandari et al., ZeRO (arXiv 1910.02054). It takes the place of a DataParallel, a MixedPrecision and their
    optimizer, and of `tied` in a Pipeline. ::

        zero = ShardedOptimizer(chunks, grid, partial(torch.optim.AdamW, lr=1e-3), torch.bfloat16, stage=2)
        pipeline = Pipeline(grid, chunks, schedule, loss_fn, data_parallel=zero)
        pipeline.step(inputs, targets, zero.loss_scale)  # or: backward, then zero.finish_grad_sync()
        norm = zero.step(max_norm=1.0)  # None if the gradients of a rank were not finite

    Let Ψ be the parameters of this rank, d the replicas. Per parameter of 16 bits with AdamW, a rank has 2 bytes, and 2
    of the gradient in stage 1; in stage 2, 2/d and two buckets; 12/d of masters and moments, and 4/d more during the
    step. Without ZeRO it has 16. Gradients that micro-batches accumulate are full until the last backward.

    With an optimizer that updates each element by itself (SGD, Adam, AdamW, fused or not), parameters get the bits of a
    DataParallel and that optimizer, if the backend sums in the same order in a reduce-scatter as in an all-reduce:
    ringcomm does so on one machine. The gradient norm is summed in another order. Parameters may be changed between
    steps, alike on all replicas; the changed elements are copied to the masters.

    Communication: forward, none, except that it awaits the parameters of `units`. Backward: reduce-scatters of gradient
    buckets send (d-1)/d times the bytes of the gradients. Step: an all-reduce of one number over all ranks, then
    all-gathers that send (d-1)/d times the bytes of the parameters: together the 2Ψ(d-1)/d elements of a DataParallel.
    Each parameter is padded to a multiple of 64 elements, each bucket to one of 64 · d. Shards of tied gradients are
    all-reduced over their group. At construction, all parameters and buffers are broadcast from the first replica.

    Args:
        modules: a module, or the chunks of a pipeline; their parameters become views of buckets
        grid: the ranks
        optimizer: creates the optimizer for a list of parameters, which may be put into groups. It is tried on small
            matrices first; the last optimizer that it creates is the one that is used.
        dtype: dtype to convert the modules to. In 16 bits the optimizer has float32 masters. None: as they are.
        stage: 1: sharded optimizer states; 2: sharded gradients too, for which backward awaits earlier buckets
        tied: parameters that other ranks copy, each with the process group of the copies, as `gpt_tied_weights` returns
        units: modules whose parameters only their own forward reads, in the order of their forwards. Their all-gathers
            run while earlier modules compute. Whatever uses a parameter of an unfinished all-gather waits for it; only
            code that keeps a view of its memory calls `finish_param_sync`.
        bucket_bytes: bytes of parameters at which a bucket is full
        grad_dtype: dtype in which gradients are accumulated and reduced, as in DataParallel. None: as the parameters.
        scaling: `init_scale` and `growth_interval`, as those of a `LossScale`

    Attributes:
        parameters: the parameters of the modules, each once
        optimizer: the optimizer, for this rank's pieces of the parameters; its options, such as `lr`, may be changed
        scale: the loss scale and its state

    Raises:
        ArgumentError: the stage or a dtype is not one of those above, `bucket_bytes` is below 1, there are no
            parameters, `optimizer` creates no optimizer, a tied parameter or one of the optimizer is not one of the
            modules, the optimizer does not update each element by itself, the replicas differ, or a DataParallel
            averages their gradients. All ranks raise.
    """

    def __init__(
        self,
        modules: Modules,
        grid: Grid,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        dtype: torch.dtype | None = None,
        *,
        stage: int = 2,
        tied: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        units: Iterable[nn.Module] = (),
        bucket_bytes: int = BUCKET_BYTES,
        grad_dtype: torch.dtype | None = None,
        **scaling: Unpack[LossScaleOptions],
    ) -> None:
        self.chunks, groups = as_list(modules), dict(tied)
        module = nn.ModuleList(self.chunks)
        self.parameters = list(module.parameters())
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        with grid.raise_on_all():
            integer("bucket_bytes", bucket_bytes, 1)
            _check_options(stage, dtype, grad_dtype, trained)
            check_elementwise("optimizer", optimizer, grid.device)
            created = create_optimizer("optimizer", optimizer, self.parameters)
            refuse_synchronized(trained)
            _check_known("tied", groups, self.parameters)
            _check_known("optimizer", optimized(created), self.parameters)
        Training.__init__(self, created, grid, LossScale(dtype, **scaling))
        with grid.raise_on_all():  # after the replicas of this stage have found the same
            check_replicas(module, grid.dp_cp)
        broadcast_replicas(module, grid.dp_cp)
        originals = {parameter: parameter.detach() for parameter in trained}
        if dtype:
            module.to(dtype)
        if grad_dtype:
            set_grad_dtype(trained, grad_dtype)
        lists = partition_by_axis([x for x in trained[::-1] if x not in groups], grid.dp_cp, module, bucket_bytes)
        lists += [(grid.dp_cp, [each]) for each in groups if each.requires_grad]  # in buckets that are cut alike
        partitions = [Partition(listed, axis) for axis, listed in lists]
        self._shards = [ParameterShard(each, originals) for each in partitions]
        GradientSync.__init__(self, self.chunks, grid.dp_cp, _gradient_shards(partitions, self._shards, groups, stage))
        self.tied = groups.keys()
        self._pieces = {parameter: piece for shard in self._shards for parameter, piece in shard.pieces.items()}
        self._states = ShardStates(self.optimizer, self._shards)
        if dtype in (torch.bfloat16, torch.float16) and isinstance(self.optimizer, OffloadedOptimizer):
            with grid.raise_on_all():
                self.optimizer.offload_parameters()
        self._gathers = ParameterGathers(self._shards, self.chunks, list(units))
        self._hooks += self._gathers.hooks

    def step(self, max_norm: float = float("inf")) -> float | None:
        """Run an optimizer step with gradients clipped to `max_norm`; return their norm, or None if it was skipped.

        The norm is that of the whole model. All ranks skip the step if a gradient of any rank, or the norm, is not
        finite. The gradients are freed.

        Raises:
            ArgumentError: `max_norm` is negative or nan, or the gradients are not averaged; nothing is sent.
        """
        if not max_norm >= 0:
            raise refuse("max_norm", "at least 0", max_norm)
        if any(bucket.grad is None for bucket in self._buckets):
            raise ArgumentError("step without gradients: call finish_grad_sync after backward, on all ranks")
        with self.grid.abort_on_error():
            self.copy_changes()
            grads = {each: grad for bucket in self._buckets for each, grad in bucket.gradients().items()}
            norm = self._norm(grads) / self.loss_scale
            finite = bool(norm.isfinite())
            if finite:
                factor = float(clip_factor(norm, max_norm)) / self.loss_scale
                self.zero_grad()
                while grads:  # each frees its memory
                    parameter, grad = grads.popitem()
                    piece = self._pieces[parameter]
                    grad = grad.to(piece.dtype)
                    piece.grad = (grad if factor == 1 else grad.mul_(factor)).to(piece.device)
                self.optimizer.step()
                for piece in self._pieces.values():
                    piece.grad = None
                self._gathers.start()
            self.zero_grad()
            self.scale.update(found_inf=not finite)
            return float(norm) if finite else None

    def zero_grad(self) -> None:
        """Free all gradients."""
        for holder in (*self._buckets, *self.parameters):
            holder.grad = None

    def abort(self) -> None:
        """Abort all groups of the grid."""
        self.grid.abort()

    def finish_param_sync(self) -> None:
        """Wait until all parameters have the values of the last step."""
        self._gathers.finish()

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return the full states on every rank, in memory of the CPU; or this rank's shards. All replicas call it.

        "state" and "param_groups" are those of the optimizer without ZeRO, which can load them. "masters" has the full
        values of its parameters, by the same numbers, "loss_scale" the scale of float16.

        With `sharded`, states and masters are this rank's parts of those of the full model, by name, in the memory that
        the optimizer uses: for `torch.distributed.checkpoint` to save, or to load in place, from any layout. ::

            checkpoint.save({"zero": zero.state_dict(sharded=True)}, checkpoint_id=folder)  # or async_save

            zero.create_states()  # of an optimizer that has not stepped
            state = {"zero": zero.state_dict(sharded=True)}
            checkpoint.load(state, checkpoint_id=folder)
            zero.load_state_dict(state["zero"])

        Communication: an all-gather of the pickled states and masters; with `sharded`, none.
        """
        self.copy_changes()
        found = sharded_states(self, self.chunks) if sharded else self._states.state_dict()
        return {**found, "loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load full states: of this class with any number of replicas, or of the optimizer without ZeRO.

        Or load shards that `state_dict(sharded=True)` of this object returned, in which values have been loaded since,
        or copies of them. Parameters without a master in `state` keep their values, which may have been changed. All
        ranks call it.

        Communication: all-gathers of the parameters.

        Raises:
            ArgumentError: the states are of other groups or shapes of parameters, or not of those of this object. All
                ranks raise.
        """
        if state["param_groups"] and all("params" not in each for each in state["param_groups"]):
            self.finish_param_sync()
            load_sharded_states(self, self.chunks, state)
        else:
            self.copy_changes()
            with self.grid.raise_on_all():  # before anything changes
                states, masters = self._states.cut_states(state)
            with self.grid.raise_on_all():
                self.optimizer.load_state_dict(states)
            with torch.no_grad():
                for piece, master in masters.items():
                    piece.copy_(master)
        self.scale.load_state_dict(state.get("loss_scale", {}))
        self.update_parameters()

    def update_parameters(self) -> None:
        """Gather the parameters anew, from the pieces that the optimizer has. All replicas call it."""
        self._gathers.start()
        self.finish_param_sync()

    def create_states(self) -> None:
        """Give an optimizer that has not stepped the states that `torch.distributed.checkpoint.load` is to fill.

        Until then they are those of a step with gradients of zero. Parameters and masters keep their values.
        """
        for shard in self._shards:
            create_states(self.optimizer, shard.pieces.values())

    def held(self, parameter: nn.Parameter) -> Tensor:
        """Return this replica's piece of a parameter, as the optimizer has it: maybe empty. Frozen ones are whole."""
        return self._pieces.get(parameter, parameter)

    def part(self, x: Tensor, parameter: nn.Parameter, spec: ShardSpec | None) -> Tensor:
        """Return the piece of a parameter, or a state of its shape, as torch.distributed.checkpoint takes it."""
        if parameter not in self._pieces or not parameter.numel():
            return as_dtensor(x.view(parameter.shape), spec, self.grid.tp)
        begin = self._states.partitions[parameter].begin_of(parameter)
        return part_of(x, begin, parameter, spec, self.grid.tp)

    def copy_changes(self) -> None:
        """Copy to the buckets and the masters what the program has changed in the parameters."""
        self.finish_param_sync()
        for shard in self._shards:
            shard.move_assigned()
        copy_to_masters(pair for shard in self._shards for pair in shard.masters())

    def _norm(self, grads: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Return the norm of the gradients of the whole model; not finite if a gradient of any rank is not."""
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        if grads:
            counted = counted_parameters(self.chunks, self.grid.tp)
            norms = [local_norm(grad) for grad in grads.values()]
            counts = torch.tensor([float(parameter in counted) for parameter in grads], device=total.device)
            total = (torch.stack(norms).square() * counts).sum()  # 0 · infinity is nan
        return all_reduced(total, self.grid.world).sqrt()


def _gradient_shards(
    partitions: list[Partition],
    shards: list[ParameterShard],
    groups: Mapping[nn.Parameter, dist.ProcessGroup],
    stage: int,
) -> list[GradientShard]:
    """Return the gradients of these shards of parameters; in stage 2 those alike in ranks and dtype share buffers."""
    pools: dict[Any, BufferPool] = defaultdict(BufferPool)
    return [
        GradientShard(
            each,
            pools[each.dp, kind(each.parameters[0])] if stage == 2 else None,
            groups.get(each.parameters[0]),
            keeps_memory=not shard.has_masters,
        )
        for each, shard in zip(partitions, shards, strict=True)
    ]


def _check_options(
    stage: int, dtype: torch.dtype | None, grad_dtype: torch.dtype | None, trained: list[nn.Parameter]
) -> None:
    if stage not in (1, 2):
        raise refuse("stage", "1 or 2; torch's fully_shard is stage 3", repr(stage))
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise refuse("dtype", "None, torch.float32, torch.bfloat16 or torch.float16", dtype)
    if dtype is None and any(parameter.element_size() < 4 for parameter in trained):
        raise refuse("dtype", "that of the parameters, for masters", None)
    if grad_dtype:
        check_grad_dtype(grad_dtype)


def _check_known(what: str, given: Iterable[nn.Parameter], known: list[nn.Parameter]) -> None:
    for parameter in set(given).difference(known):
        raise refuse(what, "parameters of the chunks only", f"another, of shape {tuple(parameter.shape)}")
