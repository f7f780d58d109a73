"""The flat buffers of ZeRO: parameters of which each replica updates an equal shard, and gradients reduced to shards.

A buffer is padded to d equal shards, for d replicas; a shard may begin and end inside a parameter, at a multiple of
`VECTOR` elements of it. Gradients are marked as in `gradient_sync.py`, where each piece of a parameter begins, so that
its owner sees whether any replica used it.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.parallel.collectives import all_gather_single, reduce_scatter_single
from ringcomm.parallel.data.buckets import zeros
from ringcomm.parallel.data.gradients import grad_dtype, mark_unused, refuse_sparse
from ringcomm.parallel.data.zero.gathering import mark_gathered, mark_gathering
from ringcomm.parallel.grid import Axis

__all__ = ["VECTOR", "GradientBuffers", "ShardBucket"]

# Elements: parameters begin, and are cut, at multiples. Fused optimizers round the rest of a vector differently, and so
# may matrix products at addresses that are not multiples of 64 bytes, as those of torch are.
VECTOR = 64


class ShardBucket:
    """Parameters in one buffer, this replica's shard of them, and its shard of their gradients.

    The parameters become views of the buffer. The optimizer updates the shard where it is; of parameters of 16 bits, a
    float32 master of the shard.

    Args:
        parameters: of one dtype, one dtype of gradients and one device
        originals: their values before a conversion to 16 bits, for the masters
        dp: the replicas
        buffers: lends the buffers of gradients (stage 2); None: the bucket has its own (stage 1)
        tied: group of the ranks with a copy of the parameters, which sum its gradients

    Attributes:
        pieces: the part of each parameter in this replica's shard: what the optimizer has. It is flat, and maybe empty.
        grad: the gradient of the shard, once it is reduced
        missing: parameters whose gradients are not collected yet
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        originals: Mapping[nn.Parameter, torch.Tensor],
        dp: Axis,
        buffers: "GradientBuffers | None",
        tied: dist.ProcessGroup | None,
    ) -> None:
        self.dp, self.tied, self._buffers = dp, tied, buffers
        self.shard = _padded(sum(_padded(each.numel(), VECTOR) for each in parameters), VECTOR * dp.size) // dp.size
        self._like = parameters[0]
        values_like = self._like.detach()  # without the dtype of its gradients
        self._values = zeros(self.shard * dp.size, values_like, dp.group)
        self._slots: dict[torch.Tensor, slice] = {}
        begin = 0
        for parameter in parameters:
            self._slots[parameter] = slice(begin, begin + parameter.numel())
            self._move(parameter)
            begin += _padded(parameter.numel(), VECTOR)
        self._mine = self._values.narrow(0, dp.rank * self.shard, self.shard)
        self._has_masters = self._like.element_size() < 4
        master = self._mine.float() if self._has_masters else self._mine
        self.pieces = {each: nn.Parameter(self.own(master, each)) for each in parameters}
        for parameter in parameters if self._has_masters else ():
            self.pieces[parameter].data.copy_(self.cut(originals[parameter], parameter))
        self._starts: dict[torch.Tensor, torch.Tensor] = {each: self._piece_starts(each) for each in parameters}
        self.missing: set[torch.Tensor] = set(parameters)
        self.grad: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._buffer = None if buffers else self.new_buffer(len(self._values))
        if buffers:
            buffers.size = max(buffers.size, len(self._values))
        self._kept: torch.Tensor | None = None  # memory of the shard of gradients in stage 2
        self._reducing: dist.Work | None = None
        self._gathering: dist.Work | None = None

    # --- Gradients ----------------------------------------------------------------------------------------------------

    def collect(self, parameter: torch.Tensor) -> None:
        """Move the gradient of a parameter, divided by the number of replicas, to the buffer."""
        refuse_sparse(parameter)
        grad = parameter.grad
        if self._buffer is None:
            assert self._buffers
            self._buffer = self._buffers.lend(self)
        elif self.grad is not None and len(self.missing) == len(self._slots):
            self.grad = self.grad.clone()  # of earlier batches, in the buffer that is filled again
        self.missing.remove(parameter)
        view = self._view(self._buffer, parameter)
        if grad is None:
            mark_unused(view)
        else:
            torch.mul(grad, 1 / self.dp.size, out=view)
            self._buffer[self._starts[parameter]] += 0.0  # turns -0.0 into 0.0
        parameter.grad = None

    def send(self) -> None:
        """Start to reduce the gradients, each shard to its replica."""
        assert self._buffer is not None
        buffer = self._buffer[: len(self._values)]
        self._reduced = self._new_shard() if self._buffers else buffer.narrow(0, self.dp.rank * self.shard, self.shard)
        self._reducing = reduce_scatter_single(self._reduced, buffer, group=self.dp.group, async_op=True)
        if self._buffers:
            self._buffers.reducing.append(self)

    def receive(self) -> None:
        """Wait until the shard is reduced, and give a lent buffer back."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if self._buffers:
            assert self._buffer is not None
            self._buffers.reducing.remove(self)
            self._buffers.take_back(self._buffer)
            self._buffer = None

    def wait(self) -> None:
        """Wait until the gradient of the shard is final; it is added to that of earlier batches."""
        self.receive()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self.tied:
            dist.all_reduce(reduced, group=self.tied)
        self.grad = reduced if self.grad is None else self.grad.add_(reduced)
        self.missing = set(self._slots)

    def _new_shard(self) -> torch.Tensor:
        """Return memory for the gradient of the shard, which a step without masters can use again: it saves faults."""
        if self._has_masters or self.grad is not None:
            return self._mine.new_empty(self.shard, dtype=grad_dtype(self._like))
        if self._kept is None:
            self._kept = self._mine.new_empty(self.shard, dtype=grad_dtype(self._like))
        return self._kept

    def new_buffer(self, size: int) -> torch.Tensor:
        """Return a buffer for gradients."""
        return zeros(size, self._like, self.dp.group)

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients of the pieces that are not empty, and whose parameter any replica used."""
        assert self.grad is not None
        owned = [each for each, piece in self.pieces.items() if piece.numel()]
        grads = {each: self.own(self.grad, each) for each in owned}
        if not grads:
            return {}
        firsts = torch.stack([grad.view(-1)[0] for grad in grads.values()])
        unused = (firsts.signbit() & (firsts == 0)).tolist()
        return {each: grad for (each, grad), skip in zip(grads.items(), unused, strict=True) if not skip}

    # --- Parameters ---------------------------------------------------------------------------------------------------

    def move_assigned(self) -> None:
        """Move the parameters to whose `data` the program has assigned another tensor back to the buffer."""
        for parameter in self.pieces:
            if parameter.data_ptr() != self._view(self._values, parameter).data_ptr():
                self._move(parameter)

    def masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this replica's part of each parameter that has a master, with the master."""
        if self._has_masters:
            yield from ((self.own(self._mine, each), piece) for each, piece in self.pieces.items() if piece.numel())

    def start_gather(self) -> None:
        """Start to gather the updated shards of all replicas. Whatever uses a parameter first waits for them."""
        for parameter, piece in self.pieces.items() if self._has_masters else ():
            self.own(self._mine, parameter).copy_(piece.detach())
        self._gathering = all_gather_single(self._values, self._mine, group=self.dp.group, async_op=True)
        mark_gathering(self.pieces, self.finish_gather)

    def finish_gather(self) -> None:
        """Wait until the parameters have the shards of all replicas."""
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        mark_gathered(self.pieces)

    # --- Places -------------------------------------------------------------------------------------------------------

    def own(self, shard: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return the part of a parameter in a tensor of the shard: flat, except that a scalar stays one."""
        span, start = self._span(parameter, self.dp.rank), self.dp.rank * self.shard
        part = shard[span.start - start : span.stop - start]
        return part if parameter.dim() or not part.numel() else part.view(())

    def begin_of(self, parameter: nn.Parameter) -> int:
        """Return where this replica's part of a parameter begins in it."""
        begin: int = self._span(parameter, self.dp.rank).start - self._slots[parameter].start
        return begin

    def cut(self, full: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return this replica's part of a tensor of a parameter's shape, in the shape of the piece."""
        span, start = self._span(parameter, self.dp.rank), self._slots[parameter].start
        return full.detach().reshape(-1)[span.start - start : span.stop - start].view(self.pieces[parameter].shape)

    def _move(self, parameter: nn.Parameter) -> None:
        """Make a parameter a view of the buffer, which gets its values."""
        view = self._view(self._values, parameter)
        view.copy_(parameter.detach())
        parameter.data = view

    def _view(self, buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return buffer[self._slots[parameter]].view(parameter.shape)

    def _span(self, parameter: torch.Tensor, replica: int) -> slice:
        """Return where the part of a parameter in a replica's shard is; where it would be, if it is empty."""
        slot, begin = self._slots[parameter], replica * self.shard
        start = min(max(slot.start, begin), begin + self.shard)
        return slice(start, max(start, min(slot.stop, begin + self.shard)))

    def _piece_starts(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return where the pieces of a parameter begin, on all replicas."""
        spans = [self._span(parameter, replica) for replica in range(self.dp.size)]
        firsts = [span.start for span in spans if span.start < span.stop]
        return torch.tensor(firsts, dtype=torch.int64, device=self._like.device)


class GradientBuffers:
    """Two buffers in which gradients wait to be reduced, lent to one bucket after another: stage 2.

    While both are lent, the next bucket waits until the earlier of them is reduced. It gets a third if none is being
    reduced, because backward fills the buckets in another order.
    """

    def __init__(self) -> None:
        self.size = 0  # of the largest bucket
        self.reducing: deque[ShardBucket] = deque()
        self.free: list[torch.Tensor] = []
        self._made = 0

    def lend(self, bucket: ShardBucket) -> torch.Tensor:
        if not self.free and self._made >= 2 and self.reducing:
            self.reducing[0].receive()
        if self.free:
            return self.free.pop()
        self._made += 1
        return bucket.new_buffer(self.size)

    def take_back(self, buffer: torch.Tensor) -> None:
        if len(self.free) < 2:
            self.free.append(buffer)
        else:
            self._made -= 1


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
