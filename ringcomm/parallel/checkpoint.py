"""Checkpoints that fit every grid: the full tensors of the full model, by torch.distributed.checkpoint.

What the ranks of the tensor axis hold parts of is put together before it is written, and cut anew when it is read; what
several ranks have is written by one of them. So a checkpoint knows nothing of the grid that wrote it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ringcomm.errors import refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.layout import Split, cut, splits, to_full

__all__ = ["load_checkpoint", "save_checkpoint"]

Path = str | os.PathLike[str]


def save_checkpoint(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    grid: Grid,
    numbers: Mapping[str, float],
) -> None:
    """Write model and optimizer to the folder `path`; all ranks call it.

    The optimizer works on the parameters of the chunks, in their order, or on copies of them, which are written in
    their place (`MixedPrecision.masters`). Of a `ZeroRedundancyOptimizer` over `grid.dp` each replica writes its share
    of the states. Communication: an all-gather of what is cut, over tp; and what torch needs.

    Args:
        path: the folder, which all ranks see
        chunks: the modules of this rank
        optimizer: what trains them; its states are kept, its rates and the like are not
        grid: that of the chunks
        numbers: what else the training needs to go on, the same on every rank: {"step": 100}

    Raises:
        ArgumentError: the optimizer is not one of these parameters, or has a state that is no tensor.
    """
    states = _local(optimizer).state
    tensors = {
        _key("", name): torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
        for name, number in numbers.items()
    }
    for name, _, tensor, split in _trained(chunks, optimizer):
        held = {"": tensor.detach(), **states.get(tensor, {})}
        for key, value in held.items():
            if not isinstance(value, Tensor):
                raise refuse(f"the optimizer's state {key} of {name}", "a tensor", value)
        like = {key: split for key, value in held.items() if split and value.shape == tensor.shape}
        full = to_full(held, like, grid.tp)
        tensors |= {_key(name, key): value for key, value in full.items()}
    save(tensors, checkpoint_id=path)


def load_checkpoint(
    path: Path, chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, grid: Grid
) -> dict[str, float]:
    """Set model and optimizer to what the folder `path` has, and return the numbers that were written with them.

    All ranks call it, with chunks of the same model and an optimizer of the same kind, on any grid. Each reads the full
    tensors of its parameters. No communication but what torch needs.

    Raises:
        ArgumentError: the checkpoint is of a model without one of these parameters, or with one of another shape.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    full = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    trained = list(_trained(chunks, optimizer))
    mine = {"", *(name for name, *_ in trained)}
    wanted = {key: tensor for key, tensor in full.items() if _name_of(key) in mine}
    load(wanted, checkpoint_id=path)
    states, kept = _local(optimizer).state, set(_worked_on(_local(optimizer)))
    with torch.no_grad():
        for name, parameter, tensor, split in trained:
            if name not in wanted:
                raise refuse(f"the checkpoint {path}", f"one with {name}", f"{len(full)} other tensors")
            values = {key.partition(":")[2]: wanted[key] for key in wanted if _name_of(key) == name}
            whole = values[""].shape
            parts = {
                key: cut(value, split, grid.tp) if split and value.shape == whole else value
                for key, value in values.items()
            }
            if parts[""].shape != tensor.shape:
                raise refuse(f"this rank's part of {name}", tuple(tensor.shape), tuple(parts[""].shape))
            tensor.copy_(parts.pop(""))
            parameter.copy_(tensor)
            if tensor in kept:
                states[tensor] = parts
    return {key.partition(":")[2]: wanted[key].item() for key in wanted if _name_of(key) == ""}


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the states of this rank: that inside a ZeroRedundancyOptimizer, if it is one."""
    local: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return local


def _worked_on(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _trained(
    chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, Tensor, Split | None]]:
    """Yield name and parameter, what the optimizer has in its place, and how it is cut."""
    cuts = {name: split for chunk in chunks for name, split in splits(chunk).items()}
    named = list(nn.ModuleList(chunks).named_parameters())
    worked_on = _worked_on(optimizer)
    if [parameter.shape for _, parameter in named] != [tensor.shape for tensor in worked_on]:
        raise refuse("the optimizer", f"one of the {len(named)} parameters of the chunks", f"one of {len(worked_on)}")
    for (numbered, parameter), tensor in zip(named, worked_on, strict=True):
        name = numbered.partition(".")[2]  # without the number of the chunk
        yield name, parameter, tensor, cuts.get(name)


def _key(name: str, key: str) -> str:
    """Return the key of a parameter (""), of an optimizer's state of it, or of a number (which is of no parameter)."""
    return f"{name}:{key}" if key else name


def _name_of(key: str) -> str:
    return key.partition(":")[0]
