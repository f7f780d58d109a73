"""Data parallelism: the replicas of a model average their gradients while backward still runs."""

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
from ringcomm.parallel.layout import Modules, listed

__all__ = ["DataParallel"]

FIRST = 1 << 20  # bytes of the first bucket: a small one, so that sending starts early; as in torch


class DataParallel:
    """Keeps the gradients of a module the same on all replicas: their average.

    After Li et al., PyTorch Distributed (arXiv 2006.15704): backward comes to the last parameters first, so gradients
    are collected in buckets in reverse order, and a full bucket is sent while backward goes on. Buckets are sent in the
    same order on every rank, whatever order backward takes. Gradients become views of the buckets, so that nothing has
    to be copied back.

        replicas = DataParallel(model, grid.dp)
        loss(model(x), y).backward()
        replicas.finish()
        optimizer.step()

    At the start: a broadcast of all parameters and buffers from the first replica. A step: all-reduces that send
    2 · (d-1)/d times the bytes of the parameters. Gradients are averaged as long as this object lives:
    let go of it before the module gets another, or both divide them.

    Args:
        modules: what to keep the same: a module, or the chunks of a pipeline
        dp: the replicas
        bucket_bytes: the size from which on a bucket is sent

    Raises:
        ArgumentError: the replicas differ in the shape, dtype or `requires_grad` of a parameter, or in a buffer.
    """

    def __init__(self, modules: Modules, dp: Axis, *, bucket_bytes: int = 25 << 20) -> None:
        several = listed(modules)
        module = nn.ModuleList(several)
        self.dp = dp
        self._quiet = False
        self._buckets: list[Bucket] = []
        self._sent = 0  # how many buckets are on their way, or there
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if dp.size == 1:
            return
        alike(module, dp)
        take_from_first([*module.parameters(), *module.buffers()], dp)
        self._buckets = [Bucket(parameters, dp) for parameters in in_buckets(self._trained[::-1], bucket_bytes)]
        # Each chunk of a pipeline has a backward of its own: what several have is there when all are done, at `finish`.
        uses: Counter[torch.Tensor] = Counter(parameter for each in several for parameter in each.parameters())
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self), bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.views
            if uses[parameter] == 1
        ]
        weakref.finalize(self, _remove, hooks)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add up gradients on this rank only; the next `finish` averages them with what came later."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def finish(self) -> None:
        """Wait until all gradients are averages. Every rank calls it, after backward and before it uses gradients.

        A parameter that had no part in the loss has a gradient of zeros here, and the average over all ranks after.
        Ranks call it after a backward that has failed, too, if they want to go on.
        """
        for bucket in self._buckets:
            for parameter in list(bucket.missing):
                bucket.collect(parameter)
        self._send()
        for bucket in self._buckets:
            bucket.finish()
        self._sent = 0
        for parameter in self._trained:  # one replica has no buckets
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _send(self) -> None:
        """Send the buckets that are full, up to the first that is not."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].send()
            self._sent += 1


def _remove(hooks: list[RemovableHandle]) -> None:
    """Let go of the buckets, which a module would keep as long as it lives."""
    for hook in hooks:
        hook.remove()


def _collect(of: "weakref.ref[DataParallel]", bucket: "Bucket", parameter: torch.Tensor) -> None:
    """Take a gradient that has come."""
    replicas = of()
    if replicas and not replicas._quiet:
        bucket.collect(parameter)
        replicas._send()


class Bucket:
    """The gradients of some parameters, one after the other in one piece of memory."""

    def __init__(self, parameters: list[torch.Tensor], dp: Axis) -> None:
        self.dp = dp
        self.memory = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
        pieces = torch.split(self.memory, [parameter.numel() for parameter in parameters])
        self.views = {each: piece.view(each.shape) for each, piece in zip(parameters, pieces, strict=True)}
        self.missing = set(parameters)
        self.work: dist.Work | None = None

    def collect(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, divided by the number of replicas."""
        if parameter not in self.missing:
            raise ArgumentError(
                "backward ran again before the gradients of the last one were there: call finish after each backward, "
                "also after one that failed, or run it inside no_sync"
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise refuse(
                f"the gradient of a parameter of shape {tuple(parameter.shape)}", "a dense one", "a sparse one"
            )
        self.missing.remove(parameter)
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, 1 / self.dp.size, out=view)
        parameter.grad = view

    def send(self) -> None:
        self.work = dist.all_reduce(self.memory, group=self.dp.group, async_op=True)

    def finish(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None
        self.missing = set(self.views)


def alike(module: nn.Module, dp: Axis) -> None:
    """Refuse, on all replicas, modules that would not send the same."""
    mine = [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in module.named_parameters()]
    mine += [f"the buffer {n} {tuple(x.shape)} {x.dtype}" for n, x in module.named_buffers()]
    replicas: list[list[str]] = [[]] * dp.size
    dist.all_gather_object(replicas, mine, group=dp.group)
    for replica, theirs in enumerate(replicas):
        for number, (first, other) in enumerate(zip_longest(replicas[0], theirs, fillvalue="none")):
            if first != other:
                what = f"tensor {number} of replica {replica} (rank {dp.ranks[replica]})"
                raise refuse(what, f"as on rank {dp.ranks[0]}, {first}", other)


def take_from_first(tensors: Iterable[torch.Tensor], dp: Axis) -> None:
    """Set the tensors to those of the first replica, by a broadcast of each."""
    if dp.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), dp.ranks[0], group=dp.group)


def in_buckets(parameters: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Cut the parameters into lists of one dtype and device, each ended when it has so many bytes."""
    bucket: list[torch.Tensor] = []
    size, enough = 0, min(FIRST, most)
    for parameter in parameters:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if not alike or size >= enough:
            yield bucket
            bucket, size, enough = [], 0, most
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
