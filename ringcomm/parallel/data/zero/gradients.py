"""Gradients in a flat buffer, which are reduced so that each replica gets the sum of its shard.

They are marked as those of `buckets.py`, where each part of a parameter begins, so that its owner sees whether any
replica used it.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.collectives import reduce_scatter_single
from ringcomm.parallel.data.buckets import zeros
from ringcomm.parallel.data.gradients import grad_dtype, mark_unused, refuse_sparse
from ringcomm.parallel.data.zero.partition import Partition

__all__ = ["BufferPool", "GradientShard"]


class GradientShard:
    """This replica's shard of the gradients of some parameters.

    Args:
        partition: who owns what
        pool: lends the buffer of the full gradients (stage 2); None: they have their own (stage 1)
        tied: group of the ranks with a copy of the parameters, which sum its gradients
        keeps_memory: whether the memory of the shard serves for later steps too, which saves page faults

    Attributes:
        grad: the gradient of the shard, once it is reduced
        missing: parameters whose gradients are not collected yet
    """

    def __init__(
        self, partition: Partition, pool: "BufferPool | None", tied: dist.ProcessGroup | None, keeps_memory: bool
    ) -> None:
        self.partition, self.dp, self.tied = partition, partition.dp, tied
        self._pool, self._keeps_memory = pool, keeps_memory
        self._starts: dict[Tensor, Tensor] = {each: partition.starts(each) for each in partition.parameters}
        self.missing: set[Tensor] = set(partition.parameters)
        self.grad: Tensor | None = None
        self._full = None if pool else self.new_buffer(partition.size)
        if pool:
            pool.size = max(pool.size, partition.size)
        self._reduced: Tensor | None = None  # of this batch
        self._memory: Tensor | None = None  # of the shard in stage 2, kept from step to step
        self._reducing: dist.Work | None = None

    def new_buffer(self, size: int) -> Tensor:
        return zeros(size, self.partition.parameters[0], self.dp.group)

    def collect(self, parameter: Tensor) -> None:
        """Move the gradient of a parameter, divided by the number of replicas, to the buffer."""
        refuse_sparse(parameter)
        if len(self.missing) == len(self._starts):
            self._begin()
        self.missing.remove(parameter)
        view = self.partition.view(self._buffer, parameter)
        if parameter.grad is None:
            mark_unused(view)
        else:
            torch.mul(parameter.grad, 1 / self.dp.size, out=view)
            self._buffer[self._starts[parameter]] += 0.0  # turns -0.0 into 0.0
        parameter.grad = None

    def send(self) -> None:
        """Start to reduce the gradients, each shard to its replica."""
        full = self._buffer[: self.partition.size]
        self._reduced = self._new_shard() if self._pool else self.partition.own_shard(full)
        self._reducing = reduce_scatter_single(self._reduced, full, group=self.dp.group, async_op=True)
        if self._pool:
            self._pool.reducing.append(self)

    def receive(self) -> None:
        """Wait until the shard is reduced, and give a lent buffer back."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if self._pool:
            self._pool.reducing.remove(self)
            self._pool.take_back(self._buffer)
            self._full = None

    def wait(self) -> None:
        """Wait until the gradient of the shard is final; it is added to that of earlier batches."""
        self.receive()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self.tied:
            dist.all_reduce(reduced, group=self.tied)
        self.grad = reduced if self.grad is None else self.grad.add_(reduced)
        self.missing = set(self._starts)

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of the parts that are not empty, and whose parameter any replica used."""
        assert self.grad is not None
        parts = {each: self.partition.own(self.grad, each) for each in self._starts}
        parts = {each: part for each, part in parts.items() if part.numel()}
        if not parts:
            return {}
        firsts = torch.stack([part.view(-1)[0] for part in parts.values()])
        unused = (firsts.signbit() & (firsts == 0)).tolist()
        return {each: part for (each, part), skip in zip(parts.items(), unused, strict=True) if not skip}

    @property
    def _buffer(self) -> Tensor:
        """The full gradients, between `_begin` and `receive`."""
        assert self._full is not None
        return self._full

    def _begin(self) -> None:
        """Get a buffer for the gradients of a batch."""
        if self._pool:
            self._full = self._pool.lend(self)
        elif self.grad is not None:
            self.grad = self.grad.clone()  # of earlier batches, in the buffer that is filled again

    def _new_shard(self) -> Tensor:
        """Return memory for the gradient of the shard."""
        if self._memory is not None and self.grad is None:
            return self._memory
        like = self.partition.parameters[0]
        memory = torch.empty(self.partition.shard, dtype=grad_dtype(like), device=like.device)
        if self._keeps_memory and self.grad is None:
            self._memory = memory
        return memory


class BufferPool:
    """Two buffers in which gradients wait to be reduced, lent to one bucket after another: stage 2.

    While both are lent, the next bucket waits until the earlier of them is reduced. It gets a third if none is being
    reduced, because backward fills the buckets in another order.
    """

    def __init__(self) -> None:
        self.size = 0  # of the largest bucket
        self.reducing: deque[GradientShard] = deque()
        self.free: list[Tensor] = []
        self._made = 0

    def lend(self, borrower: GradientShard) -> Tensor:
        if not self.free and self._made >= 2 and self.reducing:
            self.reducing[0].receive()
        if self.free:
            return self.free.pop()
        self._made += 1
        return borrower.new_buffer(self.size)

    def take_back(self, buffer: Tensor) -> None:
        if len(self.free) < 2:
            self.free.append(buffer)
        else:
            self._made -= 1
