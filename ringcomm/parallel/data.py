"""Data parallelism: replicas of a model average their gradients while backward runs."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import ArgumentError, refuse
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import Modules, as_list
from ringcomm.torch.shared import communicator_of, shared_empty

__all__ = ["DataParallel"]

FIRST_BUCKET_BYTES = 1 << 20  # small, as in torch, so that communication starts early


class DataParallel:
    """Averages the gradients of a module over its replicas.

    After Li et al., PyTorch Distributed (arXiv 2006.15704). Backward reaches the last parameters first, so gradients
    are collected in buckets in reverse order, and a full bucket is all-reduced while backward continues. Buckets are
    sent in the same order on every rank, in whatever order gradients arrive. Gradients become views of the buckets,
    which saves copying them back. ::

        data_parallel = DataParallel(model, grid.dp)
        loss(model(x), y).backward()
        data_parallel.finish_grad_sync()
        optimizer.step()

    Communication: at construction, a broadcast of all parameters and buffers from the first replica. In each step,
    all-reduces that send 2 · (d-1)/d times the bytes of the parameters.

    The object averages gradients as long as it lives: delete it before you wrap the module again, or both
    divide the gradients.

    Args:
        modules: a module, or the chunks of a pipeline
        dp: the replicas
        bucket_bytes: size at which a bucket is full

    Raises:
        ArgumentError: the replicas differ in a parameter's shape, dtype or `requires_grad`, or in a buffer.
    """

    def __init__(self, modules: Modules, dp: Axis, *, bucket_bytes: int = 25 << 20) -> None:
        chunks = as_list(modules)
        module = nn.ModuleList(chunks)
        self.dp = dp
        self._sync = True
        self._buckets: list[GradientBucket] = []
        self._sent = 0  # number of buckets whose all-reduce has started
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if dp.size == 1:
            return
        check_replicas(module, dp)
        broadcast_from_first([*module.parameters(), *module.buffers()], dp)
        self._buckets = [GradientBucket(group, dp) for group in partition(self._trained[::-1], bucket_bytes)]
        # Each chunk of a pipeline has its own backward: the gradient of a parameter of several is final only after all
        # of them, in `finish_grad_sync`.
        uses: Counter[torch.Tensor] = Counter(parameter for chunk in chunks for parameter in chunk.parameters())
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self), bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.views
            if uses[parameter] == 1
        ]
        weakref.finalize(self, _remove, hooks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next `finish_grad_sync` averages them together with later ones."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are averaged. Every rank calls it after backward, before it uses gradients.

        A parameter that does not affect the loss gets a zero gradient. After a backward that failed, all ranks call it
        too before they continue.
        """
        for bucket in self._buckets:
            for parameter in list(bucket.missing):
                bucket.collect(parameter)
        self._send()
        for bucket in self._buckets:
            bucket.wait()
        self._sent = 0
        for parameter in self._trained:  # a single replica has no buckets
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _send(self) -> None:
        """Start the all-reduce of every full bucket before the first that is not full."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].send()
            self._sent += 1


def _remove(hooks: list[RemovableHandle]) -> None:
    """Remove the hooks, which keep the buckets alive as long as the module."""
    for hook in hooks:
        hook.remove()


def _collect(owner: "weakref.ref[DataParallel]", bucket: "GradientBucket", parameter: torch.Tensor) -> None:
    """Collect a gradient as backward finishes it."""
    data_parallel = owner()
    if data_parallel and data_parallel._sync:
        bucket.collect(parameter)
        data_parallel._send()


class GradientBucket:
    """The gradients of some parameters in one contiguous buffer, reduced together."""

    def __init__(self, parameters: list[torch.Tensor], dp: Axis) -> None:
        self.dp = dp
        self.buffer = _zeros(sum(parameter.numel() for parameter in parameters), parameters[0], dp.group)
        pieces = torch.split(self.buffer, [parameter.numel() for parameter in parameters])
        self.views = {each: piece.view(each.shape) for each, piece in zip(parameters, pieces, strict=True)}
        self.missing = set(parameters)
        self.work: dist.Work | None = None

    def collect(self, parameter: torch.Tensor) -> None:
        """Copy the gradient of a parameter, divided by the number of replicas."""
        if parameter not in self.missing:
            raise ArgumentError(
                "backward ran twice without synchronization: call finish_grad_sync after each backward, also after a "
                "failed one, or run backward inside no_sync"
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise refuse(f"gradient of a parameter of shape {tuple(parameter.shape)}", "a dense one", "a sparse one")
        self.missing.remove(parameter)
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, 1 / self.dp.size, out=view)
        parameter.grad = view

    def send(self) -> None:
        self.work = dist.all_reduce(self.buffer, group=self.dp.group, async_op=True)

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None
        self.missing = set(self.views)


def _zeros(count: int, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return zeros of the dtype and on the device of a tensor, which peers of the group access directly if they can."""
    if like.is_cpu and communicator_of(group):
        return shared_empty(count, dtype=like.dtype, group=group).zero_()
    return torch.zeros(count, dtype=like.dtype, device=like.device)


def check_replicas(module: nn.Module, dp: Axis) -> None:
    """Raise on all replicas if they differ in a parameter or buffer."""
    mine = [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in module.named_parameters()]
    mine += [f"the buffer {n} {tuple(x.shape)} {x.dtype}" for n, x in module.named_buffers()]
    replicas: list[list[str]] = [[]] * dp.size
    dist.all_gather_object(replicas, mine, group=dp.group)
    for replica, theirs in enumerate(replicas):
        for number, (first, other) in enumerate(zip_longest(replicas[0], theirs, fillvalue="none")):
            if first != other:
                what = f"tensor {number} of replica {replica} (rank {dp.ranks[replica]})"
                raise refuse(what, f"as on rank {dp.ranks[0]}, {first}", other)


def broadcast_from_first(tensors: Iterable[torch.Tensor], dp: Axis) -> None:
    """Broadcast each tensor from the first replica."""
    if dp.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), dp.ranks[0], group=dp.group)


def partition(parameters: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Divide the parameters into lists of one dtype and device, each ended once it has `bucket_bytes`."""
    bucket: list[torch.Tensor] = []
    size, full = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in parameters:
        same = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if not same or size >= full:
            yield bucket
            bucket, size, full = [], 0, bucket_bytes
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
