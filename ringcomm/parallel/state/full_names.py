"""The names of a model's parameters and buffers, which a checkpoint has: each in one stage only."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import ArgumentError, refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import clean_name, full_shape, named_shards
from ringcomm.parallel.state.host_memory import Folder

__all__ = ["check_model", "full_shapes", "named_buffers", "refuse_duplicates"]

COPY, PARAMETER = "tied copy", "parameter"  # what a name is; else it is a buffer


def named_buffers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers of the modules."""
    for chunk in chunks:
        buffers = dict(chunk.named_buffers())
        yield from ((clean_name(name), x) for name, x in chunk.state_dict().items() if name in buffers)


def refuse_duplicates(chunks: Sequence[nn.Module]) -> None:
    """Raise ArgumentError if two parameters of this rank have one name."""
    named: dict[str, nn.Parameter] = {}
    for name, parameter, *_ in named_shards(chunks):
        if named.setdefault(name, parameter) is not parameter:
            raise _duplicate(name, "two chunks of a rank")


def full_shapes(chunks: Sequence[nn.Module], grid: Grid, *, saving: bool = False) -> dict[str, torch.Size]:
    """Return the shapes of all parameters and buffers of the model; all ranks raise if a name is not unique.

    Stages may have a buffer in common, such as a mask, whose values are then equal.
    """
    mine: dict[str, tuple[torch.Size, str]] = {}
    with grid.raise_on_all():
        for name, parameter, spec, is_copy in named_shards(chunks):
            mine[name] = full_shape(parameter, spec), COPY if is_copy else PARAMETER
        for name, x in named_buffers(chunks):
            kind = x.shape, _digest(x) if saving else "buffer"
            if mine.setdefault(name, kind) != kind:
                raise _duplicate(name, "two chunks of a rank")
    shards: list[dict[str, Any]] = [{}] * grid.ep.size  # of the experts
    dist.all_gather_object(shards, mine, grid.ep.group)
    stages: list[Any] = [None] * grid.pp.size
    dist.all_gather_object(stages, {name: x for shard in shards for name, x in shard.items()}, grid.pp.group)
    owners: dict[str, tuple[int, Any]] = {}
    with grid.raise_on_all():  # the buffers of some replicas only may differ
        for rank, stage in enumerate(stages):
            for name, (shape, kind) in stage.items():
                if kind == COPY:
                    continue
                owner, first = owners.setdefault(name, (rank, (shape, kind)))
                if owner != rank and (kind == PARAMETER or first != (shape, kind)):
                    raise _duplicate(name, f"ranks {owner} and {rank} of the pipeline")
    return {name: shape for stage in stages for name, (shape, _) in stage.items()}


def check_model(path: Folder, stored: Mapping[str, torch.Size], model: Mapping[str, torch.Size]) -> None:
    """Raise ArgumentError if the checkpoint is of another model."""
    if stored.keys() != model.keys():
        only = {"without": model.keys() - stored.keys(), "but with": stored.keys() - model.keys()}
        found = [f"{word} {min(names)} and {len(names) - 1} more" for word, names in only.items() if names]
        expected = f"the {len(model)} parameters of this model"
        raise refuse(f"checkpoint {path}", expected, f"{len(stored)}, {', '.join(found)}")
    for name, shape in model.items():
        if stored[name] != shape:
            raise refuse(f"{name} in checkpoint {path}", tuple(shape), tuple(stored[name]))


def _digest(x: Tensor) -> str:
    return sha256(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _duplicate(name: str, where: str) -> ArgumentError:
    return refuse("names", "each in one stage, as in the full model, or equal buffers", f"{name} on {where}")
