"""Which elements of the parameters each replica owns.

Parameters lie one after another in a flat buffer, which is padded to d equal shards, for d replicas. A shard may begin
and end inside a parameter, at a multiple of `VECTOR` elements of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.grid import Axis
from ringcomm.parallel.state.elementwise import VECTOR

__all__ = ["Partition"]


class Partition:
    """A flat buffer of parameters, of one dtype, one dtype of gradients and one device, divided among replicas.

    Attributes:
        parameters: the parameters, in order
        dp: the replicas
        shard: elements of a shard
        size: elements of the buffer
    """

    def __init__(self, parameters: Sequence[Any], dp: Axis) -> None:
        self.parameters: Sequence[nn.Parameter] = parameters
        self.dp = dp
        self._slots: dict[Tensor, slice] = {}
        end = 0
        for parameter in parameters:
            self._slots[parameter] = slice(end, end + parameter.numel())
            end += _padded(parameter.numel(), VECTOR)
        self.size = _padded(end, VECTOR * dp.size)
        self.shard = self.size // dp.size

    def view(self, buffer: Tensor, parameter: Tensor) -> Tensor:
        """Return the elements of a parameter in a buffer."""
        return buffer[self._slots[parameter]].view(parameter.shape)

    def own_shard(self, buffer: Tensor) -> Tensor:
        """Return this replica's shard of a buffer."""
        return buffer.narrow(0, self.dp.rank * self.shard, self.shard)

    def own(self, shard: Tensor, parameter: Tensor) -> Tensor:
        """Return the part of a parameter in this replica's shard: flat, except that a scalar stays one."""
        span, start = self._span(parameter, self.dp.rank), self.dp.rank * self.shard
        part = shard[span.start - start : span.stop - start]
        return part if parameter.dim() or not part.numel() else part.view(())

    def cut(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Return this replica's part of a tensor of a parameter's shape, in the shape of `own`."""
        span, start = self._span(parameter, self.dp.rank), self._slots[parameter].start
        part = full.detach().reshape(-1)[span.start - start : span.stop - start]
        return part if parameter.dim() or not part.numel() else part.view(())

    def begin_of(self, parameter: Tensor) -> int:
        """Return where this replica's part of a parameter begins in it."""
        begin: int = self._span(parameter, self.dp.rank).start - self._slots[parameter].start
        return begin

    def starts(self, parameter: Tensor) -> Tensor:
        """Return where the parts of a parameter begin in the buffer, on all replicas that have one."""
        spans = [self._span(parameter, replica) for replica in range(self.dp.size)]
        starts = [span.start for span in spans if span.start < span.stop]
        return torch.tensor(starts, dtype=torch.int64, device=parameter.device)

    def _span(self, parameter: Tensor, replica: int) -> slice:
        """Return where the part of a parameter in a replica's shard is; where it would be, if it is empty."""
        slot, begin = self._slots[parameter], replica * self.shard
        start = min(max(slot.start, begin), begin + self.shard)
        return slice(start, max(start, min(slot.stop, begin + self.shard)))


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
