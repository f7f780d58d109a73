"""The flat buffers of ZeRO: parameters of which each replica updates an equal share, and gradients reduced to shares.

A buffer is padded to d equal shares, for d replicas; a share may begin and end inside a parameter. Replicas may use
different parameters. One that did not use a parameter sends a gradient of -0.0, which stays -0.0 only if all do. So the
first element of a piece tells its owner whether any replica used the parameter, at no cost in bytes.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.parallel.data import check_gradient, grad_dtype, zeros
from ringcomm.parallel.functional import all_gather_single, reduce_scatter_single
from ringcomm.parallel.grid import Axis

__all__ = ["SharedBucket", "Staging"]

ALIGNMENT = 64  # bytes, as torch allocates: from other addresses, matrix products may round differently


class SharedBucket:
    """Parameters in one buffer, this replica's share of them, and its share of their gradients.

    The parameters become views of the buffer. One that would not be aligned there keeps its own memory, and is copied.
    The optimizer updates the share where it is; of parameters of 16 bits, a float32 master of the share.

    Args:
        parameters: of one dtype, one dtype of gradients and one device
        originals: their values before a conversion to 16 bits, for the masters
        dp: the replicas
        staging: lends the buffers of gradients (stage 2); None: the bucket has its own (stage 1)
        tied: group of the ranks with a copy of the parameters, which sum its gradients

    Attributes:
        pieces: the part of each parameter in this replica's share: what the optimizer has. It is flat, and maybe empty.
        grad: the gradient of the share, once it is reduced
        missing: parameters whose gradients are not collected yet
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        originals: Mapping[nn.Parameter, torch.Tensor],
        dp: Axis,
        staging: "Staging | None",
        tied: dist.ProcessGroup | None,
    ) -> None:
        parameters = sorted(parameters, key=lambda each: each.nbytes % ALIGNMENT != 0)  # so that few are not aligned
        self.dp, self.tied, self._staging = dp, tied, staging
        self.share = -(-sum(parameter.numel() for parameter in parameters) // dp.size)
        self._like = parameters[0]
        values_like = self._like.detach()  # without the dtype of its gradients
        self._values = zeros(self.share * dp.size, values_like, dp.group)
        self._slots: dict[torch.Tensor, slice] = {}
        self._copied: list[nn.Parameter] = []
        begin = 0
        for parameter in parameters:
            self._slots[parameter] = slice(begin, begin + parameter.numel())
            view = self._view(self._values, parameter)
            view.copy_(parameter.detach())
            if begin * parameter.element_size() % ALIGNMENT:
                self._copied.append(parameter)
            else:
                parameter.data = view
            begin += parameter.numel()
        self._mine = self._values.narrow(0, dp.rank * self.share, self.share)
        self._has_masters = self._like.element_size() < 4
        master = self._mine.float() if self._has_masters else self._mine
        self.pieces = {each: nn.Parameter(self.own(master, each)) for each in parameters}
        for parameter in parameters if self._has_masters else ():
            self.pieces[parameter].data.copy_(self.cut(originals[parameter], parameter))
        self._firsts: dict[torch.Tensor, torch.Tensor] = {each: self._first_elements(each) for each in parameters}
        self.missing: set[torch.Tensor] = set(parameters)
        self.grad: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._buffer = None if staging else self.new_buffer(len(self._values))
        if staging:
            staging.size = max(staging.size, len(self._values))
        self._kept: torch.Tensor | None = None  # memory of the share of gradients in stage 2
        self._reducing: dist.Work | None = None
        self._gathering: dist.Work | None = None

    # --- Gradients ----------------------------------------------------------------------------------------------------

    def collect(self, parameter: torch.Tensor) -> None:
        """Move the gradient of a parameter, divided by the number of replicas, to the buffer."""
        check_gradient(parameter, self.missing)
        grad = parameter.grad
        if self._buffer is None:
            assert self._staging
            self._buffer = self._staging.lend(self)
        elif self.grad is not None and len(self.missing) == len(self._slots):
            self.grad = self.grad.clone()  # of earlier batches, in the buffer that is filled again
        self.missing.remove(parameter)
        view = self._view(self._buffer, parameter)
        if grad is None:
            view.fill_(-0.0)
        else:
            torch.mul(grad, 1 / self.dp.size, out=view)
            self._buffer[self._firsts[parameter]] += 0.0  # turns -0.0 into 0.0
        parameter.grad = None

    def send(self) -> None:
        """Start to reduce the gradients, each share to its replica."""
        assert self._buffer is not None
        buffer = self._buffer[: len(self._values)]
        self._reduced = self._new_share() if self._staging else buffer.narrow(0, self.dp.rank * self.share, self.share)
        self._reducing = reduce_scatter_single(self._reduced, buffer, group=self.dp.group, async_op=True)
        if self._staging:
            self._staging.reducing.append(self)

    def receive(self) -> None:
        """Wait until the share is reduced, and give a lent buffer back."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if self._staging:
            assert self._buffer is not None
            self._staging.reducing.remove(self)
            self._staging.take_back(self._buffer)
            self._buffer = None

    def wait(self) -> None:
        """Wait until the gradient of the share is final; it is added to that of earlier batches."""
        self.receive()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self.tied:
            dist.all_reduce(reduced, group=self.tied)
        self.grad = reduced if self.grad is None else self.grad.add_(reduced)
        self.missing = set(self._slots)

    def _new_share(self) -> torch.Tensor:
        """Return memory for the gradient of the share, which a step without masters can use again: it saves faults."""
        if self._has_masters or self.grad is not None:
            return self._mine.new_empty(self.share, dtype=grad_dtype(self._like))
        if self._kept is None:
            self._kept = self._mine.new_empty(self.share, dtype=grad_dtype(self._like))
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

    def publish(self) -> None:
        """Start to send the updated share to all replicas."""
        for parameter, piece in self.pieces.items() if self._has_masters else ():
            self.own(self._mine, parameter).copy_(piece.detach())
        self._gathering = all_gather_single(self._values, self._mine, group=self.dp.group, async_op=True)

    def arrive(self) -> None:
        """Wait until the parameters have the shares of all replicas."""
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering = None
        for parameter in self._copied:
            parameter.data.copy_(self._view(self._values, parameter))

    # --- Places -------------------------------------------------------------------------------------------------------

    def own(self, share: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return the part of a parameter in a tensor of the share: flat, except that a scalar stays one."""
        span, start = self._span(parameter, self.dp.rank), self.dp.rank * self.share
        part = share[span.start - start : span.stop - start]
        return part if parameter.dim() or not part.numel() else part.view(())

    def cut(self, full: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return this replica's part of a tensor of a parameter's shape, in the shape of the piece."""
        span, start = self._span(parameter, self.dp.rank), self._slots[parameter].start
        return full.detach().reshape(-1)[span.start - start : span.stop - start].view(self.pieces[parameter].shape)

    def _view(self, buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return buffer[self._slots[parameter]].view(parameter.shape)

    def _span(self, parameter: torch.Tensor, replica: int) -> slice:
        """Return where the part of a parameter in a replica's share is; where it would be, if it is empty."""
        slot, begin = self._slots[parameter], replica * self.share
        start = min(max(slot.start, begin), begin + self.share)
        return slice(start, max(start, min(slot.stop, begin + self.share)))

    def _first_elements(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return where the pieces of a parameter begin, on all replicas."""
        spans = [self._span(parameter, replica) for replica in range(self.dp.size)]
        firsts = [span.start for span in spans if span.start < span.stop]
        return torch.tensor(firsts, dtype=torch.int64, device=self._like.device)


class Staging:
    """Two buffers in which gradients wait to be reduced, lent to one bucket after another: stage 2.

    While both are lent, the next bucket waits until the earlier of them is reduced. It gets a third if none is being
    reduced, because backward fills the buckets in another order.
    """

    def __init__(self) -> None:
        self.size = 0  # of the largest bucket
        self.reducing: deque[SharedBucket] = deque()
        self.free: list[torch.Tensor] = []
        self._made = 0

    def lend(self, bucket: SharedBucket) -> torch.Tensor:
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
