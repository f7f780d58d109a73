"""Parameters in a flat buffer, of which each replica updates its shard, and gathers those of the others."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.parallel.collectives import all_gather_single
from ringcomm.parallel.data.buckets import zeros
from ringcomm.parallel.data.zero.gathering import mark_gathered, mark_gathering
from ringcomm.parallel.data.zero.partition import Partition

__all__ = ["ParameterGathers", "ParameterShard"]


class ParameterShard:
    """This replica's shard of some parameters, which become views of a buffer.

    The optimizer updates the shard where it is; of parameters of 16 bits, a float32 master of the shard.

    Args:
        partition: who owns what
        originals: the values of the parameters before a conversion to 16 bits, for the masters

    Attributes:
        pieces: the part of each parameter in the shard: what the optimizer has. It is flat, and maybe empty.
        has_masters: whether the pieces are masters
    """

    def __init__(self, partition: Partition, originals: Mapping[nn.Parameter, Tensor]) -> None:
        self.partition, first = partition, partition.parameters[0]
        self._values = zeros(partition.size, first.detach(), partition.dp.group)  # not of the dtype of its gradients
        for parameter in partition.parameters:
            self._move(parameter)
        self._mine = partition.own_shard(self._values)
        self.has_masters = first.element_size() < 4
        master = self._mine.float() if self.has_masters else self._mine
        self.pieces = {each: nn.Parameter(partition.own(master, each)) for each in partition.parameters}
        for parameter, piece in self.pieces.items() if self.has_masters else ():
            piece.data.copy_(partition.cut(originals[parameter], parameter))
        self._gathering: dist.Work | None = None

    def move_assigned(self) -> None:
        """Move the parameters to whose `data` the program has assigned another tensor back to the buffer."""
        for parameter in self.pieces:
            if parameter.data_ptr() != self.partition.view(self._values, parameter).data_ptr():
                self._move(parameter)

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this replica's part of each parameter that has a master, with the master."""
        for parameter, piece in self.pieces.items() if self.has_masters else ():
            if piece.numel():
                yield self.partition.own(self._mine, parameter), piece

    def start_gather(self) -> None:
        """Start to gather the updated shards of all replicas. Whatever uses a parameter first waits for them."""
        for mine, master in self.masters():
            mine.copy_(master.detach())
        self._gathering = all_gather_single(self._values, self._mine, group=self.partition.dp.group, async_op=True)
        mark_gathering(self.pieces, self.finish_gather)

    def finish_gather(self) -> None:
        """Wait until the parameters have the shards of all replicas."""
        if self._gathering:
            self._gathering.wait()
            self._gathering = None
            mark_gathered(self.pieces)

    def _move(self, parameter: nn.Parameter) -> None:
        """Make a parameter a view of the buffer, which gets its values."""
        view = self.partition.view(self._values, parameter)
        view.copy_(parameter.detach())
        parameter.data = view


class ParameterGathers:
    """The all-gathers of a model's parameters after a step, in the order in which the next forward reads them.

    Args:
        shards: all parameters
        chunks: the modules, each of which reads its parameters
        units: modules in them whose parameters only they read, in the order of their forwards. With units, gathers run
            while earlier modules compute; without, `start` waits for them.

    Attributes:
        hooks: what lets each module wait for its parameters
    """

    def __init__(
        self, shards: Sequence[ParameterShard], chunks: Sequence[nn.Module], units: Sequence[nn.Module]
    ) -> None:
        self._overlaps = bool(units)
        apart = {parameter for unit in units for parameter in unit.parameters()}
        reads = [(chunk, {*chunk.parameters()} - apart) for chunk in chunks] + [(x, {*x.parameters()}) for x in units]
        self._read = [[x for x in shards if not each.isdisjoint(x.pieces)] for _, each in reads]
        self.hooks = [
            module.register_forward_pre_hook(partial(_finish_read, weakref.ref(self), number))
            for number, (module, _) in enumerate(reads if units else ())
        ]

    def start(self) -> None:
        """Start to gather the updated shards of all replicas."""
        for shard in dict.fromkeys(shard for shards in self._read for shard in shards):
            shard.start_gather()
        if not self._overlaps:
            self.finish()

    def finish(self, *numbers: int) -> None:
        """Wait for the parameters of all modules, or of those with these numbers."""
        for shards in [self._read[number] for number in numbers] or self._read:
            for shard in shards:
                shard.finish_gather()


def _finish_read(owner: "weakref.ref[ParameterGathers]", number: int, *_: Any) -> None:
    """Wait for the parameters of a module before its forward."""
    if gathers := owner():
        gathers.finish(number)
