"""Many calls as one: on lists of tensors, or in a batch that the program coalesces."""

from typing import Any

import torch
import torch.distributed as dist

from ringcomm import Communicator
from ringcomm.errors import refuse
from ringcomm.torch.compat.untraced import untraced
from ringcomm.torch.operations import Prepared, operation, reduction
from ringcomm.torch.tensors import CallTensors, Lists, Tensors, pairs, some, unwritten, without_overlap
from ringcomm.torch.works import TorchWork, coalesced

__all__ = ["Coalescing"]

COALESCED_BYTES = 1 << 20  # of tensors on a GPU that one launch reduces, at most: they are copied; an estimate

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls


@untraced
class Coalescing:
    """What a process group does with many calls, each of which it can make."""

    comm: Communicator
    # Of the group, a WorkOwner.
    group_name: Any
    annotated: Any
    ended: Any
    found: Any
    shown: Any
    allreduce: Any
    allgather: Any
    all_gather_single: Any
    reduce_scatter_single: Any
    _coalesced: list[TorchWork] | None = None  # the calls of the batch

    @operation("all_reduce", c10d.AllreduceCoalescedOptions, of_many=True)
    def allreduce_coalesced(self, opts: Any, call: CallTensors, tensors: Tensors) -> Prepared:
        apart, copies = without_overlap(some(tensors))
        if not copies and _go_as_one(apart):
            return tensors, call.all_inout(apart), reduction(opts)
        return coalesced(self, [self.allreduce([x], opts) for x in apart], tensors, copies)

    @operation("all_gather", c10d.AllgatherOptions, of_many=True)
    def allgather_coalesced(self, opts: Any, _: CallTensors, output_lists: Lists, inputs: Tensors) -> Prepared:
        lengths = [len(some(inputs)), *map(len, output_lists)]
        if len({*lengths}) > 1:
            raise refuse("the lists", f"{len(inputs)} tensors each, as inputs", f"{lengths[1:]} tensors")
        outputs = [*zip(*output_lists, strict=True)]
        pairs = zip(outputs, unwritten(inputs, outputs), strict=True)
        works = [self.allgather([out], [x], opts) for out, x in pairs]
        return coalesced(self, works, [tensor for out in outputs for tensor in out])

    @operation("all_gather", c10d.AllgatherOptions, of_many=True)
    def all_gather_single_coalesced(self, opts: Any, _: CallTensors, outputs: Tensors, inputs: Tensors) -> Prepared:
        works = [self.all_gather_single(out, x, opts) for out, x in pairs(outputs, inputs)]
        return coalesced(self, works, outputs)

    @operation("reduce_scatter", c10d.ReduceScatterOptions, of_many=True)
    def reduce_scatter_single_coalesced(self, opts: Any, _: CallTensors, outputs: Tensors, inputs: Tensors) -> Prepared:
        works = [self.reduce_scatter_single(out, x, opts) for out, x in pairs(outputs, inputs)]
        return coalesced(self, works, outputs)

    def _start_coalescing(self, device: object = None) -> None:  # noqa: ARG002 (as c10d calls it)
        self._coalesced = []
        self.comm._router.coalesce_messages(True)

    def _stop_coalescing(self) -> list[TorchWork]:
        works, self._coalesced = self._coalesced, None
        if works is not None:
            self.comm._router.coalesce_messages(False)
        return works or []

    def _end_coalescing(self, device: object = None) -> TorchWork:  # noqa: ARG002 (as c10d calls it)
        works = self._stop_coalescing()
        return coalesced(self, works, [tensor for work in works for tensor in work.outputs])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # of a Backend


def _go_as_one(tensors: Tensors) -> bool:
    """Return whether tensors on a GPU are copied into one: a launch takes longer than to copy a few bytes."""
    return (
        len(tensors) > 1
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.is_cuda and tensor.layout is torch.strided for tensor in tensors)
        and sum(tensor.nbytes for tensor in tensors) <= COALESCED_BYTES
    )
