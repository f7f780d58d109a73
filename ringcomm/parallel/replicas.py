"""Replicas of a model that start equal."""

from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.errors import refuse
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import expert_axes

__all__ = ["broadcast_from_first", "broadcast_replicas", "check_replicas"]


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
