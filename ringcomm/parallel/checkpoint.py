"""Checkpoints that fit every grid: the full tensors of the full model, by torch.distributed.checkpoint.

What the ranks of the tensor axis hold parts of is put together before it is written, and cut anew when it is read; what
several ranks have is written by one of them. So a checkpoint knows nothing of the grid that wrote it.
"""

import os
from collections.abc import Iterator, Sequence

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
    path: Path, chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, grid: Grid, step: int
) -> None:
    """Write model and optimizer to the folder `path`; all ranks call it.

    The optimizer works on the parameters of the chunks, in their order, or on copies of them, which are written in
    their place (`MixedPrecision.masters`). Communication: an all-gather of what is cut, over tp; and what torch needs.
    """
    tensors = {"step": torch.tensor(step)}
    for name, _, tensor, split in _trained(chunks, optimizer):
        held = {"": tensor.detach(), **optimizer.state[tensor]}
        like = {key: split for key, value in held.items() if split and value.shape == tensor.shape}
        full = to_full(held, like, grid.tp)
        tensors |= {_key(name, key): value for key, value in full.items()}
    save(tensors, checkpoint_id=path)


def load_checkpoint(path: Path, chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, grid: Grid) -> int:
    """Set model and optimizer to what the folder `path` has, and return the step at which it was written.

    All ranks call it, with chunks of the same model and an optimizer of the same kind, on any grid. No communication
    but what torch needs.

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
    mine = {name for name, *_ in trained}
    wanted = {key: tensor for key, tensor in full.items() if key == "step" or key.partition(":")[0] in mine}
    load(wanted, checkpoint_id=path)
    with torch.no_grad():
        for name, parameter, tensor, split in trained:
            if name not in wanted:
                raise refuse(f"the checkpoint {path}", f"one with {name}", f"{len(full)} other tensors")
            values = {key.partition(":")[2]: wanted[key] for key in wanted if key.partition(":")[0] == name}
            whole = values[""].shape
            parts = {
                key: cut(value, split, grid.tp) if split and value.shape == whole else value
                for key, value in values.items()
            }
            if parts[""].shape != tensor.shape:
                raise refuse(f"this rank's part of {name}", tuple(tensor.shape), tuple(parts[""].shape))
            tensor.copy_(parts.pop(""))
            parameter.copy_(tensor)
            optimizer.state[tensor] = parts
    return int(wanted["step"])


def _trained(
    chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, Tensor, Split | None]]:
    """Yield name and parameter, what the optimizer has in its place, and how it is cut."""
    cuts = {name: split for chunk in chunks for name, split in splits(chunk).items()}
    named = list(nn.ModuleList(chunks).named_parameters())
    worked_on = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if [parameter.shape for _, parameter in named] != [tensor.shape for tensor in worked_on]:
        raise refuse("the optimizer", f"one of the {len(named)} parameters of the chunks", f"one of {len(worked_on)}")
    for (numbered, parameter), tensor in zip(named, worked_on, strict=True):
        name = numbered.partition(".")[2]  # without the number of the chunk
        yield name, parameter, tensor, cuts.get(name)


def _key(name: str, key: str) -> str:
    return f"{name}:{key}" if key else name
