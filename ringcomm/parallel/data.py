"""Data parallelism: replicas of a model average their gradients, in buckets."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.gradient_sync import (
    GradientSync,
    grad_dtype,
    mark_unused,
    mark_used,
    refuse_sparse,
    refuse_synchronized,
    set_grad_dtype,
    was_used,
)
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import Modules, as_list, expert_axes
from ringcomm.torch.shared import communicator_of, shared_empty

__all__ = ["DataParallel"]

FIRST_BUCKET_BYTES = 1 << 20  # small, as in torch, so that communication starts early


class DataParallel(GradientSync):
    """Averages the gradients of a module over its replicas.

    After Li et al., PyTorch Distributed (arXiv 2006.15704). Backward reaches the last parameters first, so gradients
    are collected in buckets in reverse order, and a full bucket is all-reduced while backward continues. Buckets are
    sent in the same order on every rank, in whatever order gradients arrive. Gradients become views of the buckets,
    which saves copying them back. ::

        data_parallel = DataParallel(model, grid.dp_cp)
        loss(model(x), y).backward()
        data_parallel.finish_grad_sync()
        optimizer.step()

    Communication: at construction, a broadcast of all parameters and buffers from the first replica. In each step,
    all-reduces that send 2 · (d-1)/d times the bytes of the gradients. The replicas of an expert are `grid.edp`.

    The object averages gradients until it is closed or deleted. Only then wrap the module again.

    Args:
        modules: a module, or the chunks of a pipeline
        dp: the replicas
        bucket_bytes: bytes of parameters at which a bucket is full
        grad_dtype: dtype in which gradients are accumulated, reduced and kept: torch.float32 for a model in bfloat16
            with many micro-batches, whose sum in bfloat16 loses small terms (as in Megatron-LM). It remains set on the
            parameters. `MixedPrecision` accepts any; most optimizers of torch need that of the parameters. None:
            unchanged.

    Raises:
        ArgumentError: the replicas differ in a parameter's shape, dtype or `requires_grad`, or in a buffer; or
            `grad_dtype` is not a floating-point type, or torch is too old for it; `bucket_bytes` is below 1;
            or the module is wrapped already.
    """

    def __init__(
        self, modules: Modules, dp: Axis, *, bucket_bytes: int = 25 << 20, grad_dtype: torch.dtype | None = None
    ) -> None:
        integer("bucket_bytes", bucket_bytes, 1)
        chunks = as_list(modules)
        module = nn.ModuleList(chunks)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        refuse_synchronized(trained)
        if grad_dtype:
            set_grad_dtype(trained, grad_dtype)
        buckets = []
        if dp.size > 1:
            check_replicas(module, dp)
            broadcast_replicas(module, dp)
            lists = partition_by_axis(trained[::-1], dp, module, bucket_bytes)
            buckets = [GradientBucket(members, axis) for axis, members in lists]
        super().__init__(chunks, dp, buckets)


class GradientBucket:
    """The gradients of some parameters in one contiguous buffer, reduced together."""

    def __init__(self, parameters: list[torch.Tensor], dp: Axis) -> None:
        self.dp = dp
        self.buffer = zeros(sum(parameter.numel() for parameter in parameters), parameters[0], dp.group)
        pieces = torch.split(self.buffer, [parameter.numel() for parameter in parameters])
        self.views = {each: piece.view(each.shape) for each, piece in zip(parameters, pieces, strict=True)}
        self.missing = set(parameters)
        self.unused: list[torch.Tensor] = []  # by this replica, though maybe not by others
        self.work: dist.Work | None = None

    def collect(self, parameter: torch.Tensor) -> None:
        """Copy the gradient of a parameter, divided by the number of replicas."""
        refuse_sparse(parameter)
        self.missing.remove(parameter)
        view = self.views[parameter]
        if parameter.grad is None:
            mark_unused(view)
            self.unused.append(parameter)
        else:
            torch.mul(parameter.grad, 1 / self.dp.size, out=view)
            mark_used(view)
            parameter.grad = view

    def send(self) -> None:
        self.work = dist.all_reduce(self.buffer, group=self.dp.group, async_op=True)

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        for parameter in self.unused:
            if was_used(self.views[parameter]):
                parameter.grad = self.views[parameter]
        self.work, self.missing, self.unused = None, set(self.views), []


def zeros(count: int, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return zeros of the dtype of a tensor's gradient, on its device; peers of the group access them if they can."""
    if like.is_cpu and communicator_of(group):
        return shared_empty(count, dtype=grad_dtype(like), group=group).zero_()
    return torch.zeros(count, dtype=grad_dtype(like), device=like.device)


def check_replicas(module: nn.Module, dp: Axis) -> None:
    """Raise on all replicas if they differ in a parameter or buffer; those of experts may differ in their names."""
    name = dict.fromkeys(expert_axes(module), "an expert's").get
    parameters, buffers = module.named_parameters(), module.named_buffers()
    mine = [f"{name(p, n)} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in parameters]
    mine += [f"the buffer {name(x, n)} {tuple(x.shape)} {x.dtype}" for n, x in buffers]
    replicas: list[list[str]] = [[]] * dp.size
    dist.all_gather_object(replicas, mine, group=dp.group)
    for replica, theirs in enumerate(replicas):
        for number, (first, other) in enumerate(zip_longest(replicas[0], theirs, fillvalue="none")):
            if first != other:
                what = f"tensor {number} of replica {replica} (rank {dp.ranks[replica]})"
                raise refuse(what, f"as on rank {dp.ranks[0]}, {first}", other)


def broadcast_replicas(module: nn.Module, dp: Axis) -> None:
    """Broadcast each parameter and buffer from the first replica; of an expert, from the first rank that holds it."""
    experts = expert_axes(module)
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast_from_first([tensor], experts[tensor].edp if tensor in experts else dp)


def broadcast_from_first(tensors: Iterable[torch.Tensor], dp: Axis) -> None:
    """Broadcast each tensor from the first replica."""
    if dp.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), dp.ranks[0], group=dp.group)


def partition_by_axis(
    parameters: Iterable[torch.Tensor], dp: Axis, module: nn.Module, bucket_bytes: int
) -> list[tuple[Axis, list[torch.Tensor]]]:
    """Divide the parameters of a module as `partition` does, with the axis on which each list is reduced.

    The lists are in the order in which backward completes them, if `parameters` are in that of backward.
    """
    experts, by_axis = expert_axes(module), defaultdict[Axis, list[torch.Tensor]](list)
    places = {parameter: place for place, parameter in enumerate(parameters)}
    for parameter in places:
        by_axis[experts[parameter].edp if parameter in experts else dp].append(parameter)
    lists = [(axis, each) for axis, members in by_axis.items() for each in partition(members, bucket_bytes)]
    return sorted(lists, key=lambda item: places[item[1][-1]])


def kind(parameter: torch.Tensor) -> tuple[torch.dtype, torch.dtype, torch.device]:
    """Return what the parameters of a bucket have in common: the dtypes of values and gradients, and the device."""
    return parameter.dtype, grad_dtype(parameter), parameter.device


def partition(parameters: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Divide the parameters into lists of one kind, each ended once it has `bucket_bytes`."""
    bucket: list[torch.Tensor] = []
    size, full = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in parameters:
        if (bucket and kind(bucket[0]) != kind(parameter)) or size >= full:
            yield bucket
            bucket, size, full = [], 0, bucket_bytes
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
