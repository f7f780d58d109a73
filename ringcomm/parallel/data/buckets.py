"""Buckets of gradients: parameters divided into lists, and a buffer for the gradients of each."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.parallel.data.gradients import grad_dtype, mark_unused, mark_used, refuse_sparse, was_used
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import expert_axes
from ringcomm.torch.shared import communicator_of, shared_empty

__all__ = ["BUCKET_BYTES", "GradientBucket", "kind", "partition", "partition_by_axis", "zeros"]

BUCKET_BYTES = 25 << 20  # of parameters, at which a bucket is full, as in torch
FIRST_BUCKET_BYTES = 1 << 20  # small, as in torch, so that communication starts early


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


def partition_by_axis(
    parameters: Iterable[torch.Tensor], dp: Axis, module: nn.Module, bucket_bytes: int
) -> list[tuple[Axis, list[torch.Tensor]]]:
    """Divide the parameters of a module as `partition` does, with the axis on which each list is reduced.

    The lists are in the order in which backward completes them, if `parameters` are in that of backward.
    """
    experts, by_axis = expert_axes(module), defaultdict[Axis, list[torch.Tensor]](list)
    order = {parameter: number for number, parameter in enumerate(parameters)}
    for parameter in order:
        by_axis[experts[parameter].edp if parameter in experts else dp].append(parameter)
    lists = [(axis, each) for axis, listed in by_axis.items() for each in partition(listed, bucket_bytes)]
    return sorted(lists, key=lambda item: order[item[1][-1]])


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
