"""Checkpoints that fit every grid: torch.distributed.checkpoint, told which part of the full model each tensor is.

What is cut over the tensor axis is given to it as a DTensor over that axis, all else as it is. So it writes each number
once, by a rank that has it, and reads on any grid what a rank needs, without ever putting a tensor together.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ringcomm.errors import ArgumentError, RingcommError, in_words, refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.layout import Modules, Split, copies, full_shape, listed, parameters, plain, splits
from ringcomm.parallel.precision import MixedPrecision

__all__ = ["load_checkpoint", "save_checkpoint"]

Path = str | os.PathLike[str]
PRECISION = "precision."  # starts the names of its numbers


def save_checkpoint(
    path: Path,
    chunks: Modules,
    optimizer: Optimizer | MixedPrecision,
    grid: Grid,
    numbers: Mapping[str, float],
) -> None:
    """Write a model and what trains it to the folder `path`; all ranks of the grid call it.

    Written are parameters, buffers, the optimizer's states (of a `ZeroRedundancyOptimizer` over `grid.dp` by each
    replica its share), the masters and the scale of a MixedPrecision, and the numbers. Rates and other options of the
    optimizer are not, nor the states of random generators. What the folder has is written over: give each checkpoint a
    folder of its own, if an interruption must not cost the one before.

    Communication: whether all can go on, the names of the parameters, and what torch needs to agree on who writes what.

    Args:
        path: a folder that all ranks see
        chunks: the modules of this rank
        optimizer: what trains their parameters, or some of them
        grid: that of the chunks
        numbers: what else the training needs to go on, the same on every rank: {"step": 100}

    Raises:
        ArgumentError: two stages have parameters of the same name, which are not `copies`; the optimizer has
            parameters that are not in the chunks, or states that fit no other grid; a number is neither int nor
            float. All ranks raise.
        RingcommError: a rank cannot write its files, and says why. All ranks raise.
    """
    with _together(grid):
        chunks = listed(chunks)
        if isinstance(optimizer, MixedPrecision):
            numbers = {**numbers, **{PRECISION + name: number for name, number in optimizer.state_dict().items()}}
        tensors = {f":{name}": _number(name, number) for name, number in numbers.items()} | _buffers(chunks)
        states, trained = _inside(optimizer).state, list(_trained(chunks, optimizer))
        for name, _, tensor, split in trained:
            tensors[name] = _placed(tensor.detach(), split, grid)
            for key, value in states.get(tensor, {}).items():
                if not isinstance(value, Tensor):
                    raise refuse(f"the optimizer's state {key} of {name}", "a tensor", value)
                alike = value.shape == tensor.shape
                if split and value.dim() and not alike:
                    what = f"the shape of the optimizer's state {key} of {name}, which is cut over tp"
                    raise refuse(what, f"() or {tuple(tensor.shape)}", tuple(value.shape))
                tensors[f"{name}:{key}"] = _placed(value, split if alike else None, grid)
    _model(chunks, trained, grid)
    with _files(path):
        save(tensors, checkpoint_id=path, process_group=grid.world.group)


def load_checkpoint(path: Path, chunks: Modules, optimizer: Optimizer | MixedPrecision, grid: Grid) -> dict[str, float]:
    """Set a model and what trains it to what the folder `path` has, and return the numbers that were written with them.

    All ranks of the grid call it, with chunks of the same model and an optimizer of the same kind, on any grid.
    Communication: whether all can go on, the names of the parameters, and what torch needs.

    Raises:
        ArgumentError: there is no checkpoint, or it is of another model. All ranks raise.
        RingcommError: a rank cannot read its files, which may be damaged, and says why. All ranks raise. What was read
            until then is in the model.
    """
    with _together(grid):
        chunks = listed(chunks)
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
        except (OSError, EOFError, UnpicklingError) as error:
            raise refuse("the folder of a checkpoint", "one that save_checkpoint wrote", f"{path} ({error})") from error
        trained, wanted = list(_trained(chunks, optimizer)), _buffers(chunks)
    sizes: dict[str, torch.Size] = {}
    held: dict[str, dict[str, TensorStorageMetadata]] = defaultdict(dict)  # what goes with a parameter, or with none
    for key, entry in stored.items():
        name, colon, state = key.partition(":")
        if isinstance(entry, TensorStorageMetadata) and colon:
            held[name][state] = entry
        elif isinstance(entry, TensorStorageMetadata):
            sizes[name] = entry.size
    _check_model(path, sizes, _model(chunks, trained, grid))
    numbers = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in held[""].items()}
    wanted |= {f":{name}": number for name, number in numbers.items()}
    states: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    kept_here = set(_worked_on(_inside(optimizer)))
    for name, _, tensor, split in trained:
        wanted[name] = _placed(tensor.detach(), split, grid)
        for state, entry in held[name].items() if tensor in kept_here else ():
            alike = entry.size == sizes[name]
            like = tensor.detach() if alike else torch.empty(entry.size)
            states[tensor][state] = torch.zeros_like(like, dtype=entry.properties.dtype)
            wanted[f"{name}:{state}"] = _placed(states[tensor][state], split if alike else None, grid)
    with _files(path):
        load(wanted, checkpoint_id=path, process_group=grid.world.group)
    with torch.no_grad():
        for _, parameter, tensor, _ in trained:
            parameter.copy_(tensor)
    _set_states(optimizer, states)
    found = {name: number.item() for name, number in numbers.items()}
    kept = {name.removeprefix(PRECISION): found.pop(name) for name in list(found) if name.startswith(PRECISION)}
    if isinstance(optimizer, MixedPrecision):
        optimizer.load_state_dict(kept)
    return found


@contextmanager
def _together(grid: Grid) -> Iterator[None]:
    """Let all ranks fail if one does inside, where none waits for another."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    told = [""] * grid.world.size
    if grid.world.size > 1:
        words = in_words(failure)
        dist.all_gather_object(told, words, group=grid.world.group)
    if failure:
        raise failure
    for rank, words in zip(grid.world.ranks, told, strict=True):
        if words:
            raise ArgumentError(f"rank {rank} cannot go on: {words}")


@contextmanager
def _files(path: Path) -> Iterator[None]:
    """Raise what torch tells all ranks of files that cannot be written or read, as an error of ours."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        if not isinstance(failure, Exception):  # it was interrupted
            raise
        raise RingcommError(f"the checkpoint {path}: rank {rank} failed: {in_words(failure)}", rank=rank) from error


class _Trained(NamedTuple):
    """A parameter: its name in the full model, what an optimizer works on in its place, and how it is cut."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    split: Split | None


def _trained(chunks: Sequence[nn.Module], optimizer: Optimizer | MixedPrecision) -> Iterator[_Trained]:
    cuts = {name: split for chunk in chunks for name, split in splits(chunk).items()}
    masters: Mapping[nn.Parameter, Tensor] = {}
    if isinstance(optimizer, MixedPrecision):
        masters = dict(zip(optimizer.parameters, optimizer.masters, strict=True))
    named: dict[nn.Parameter, str] = {}
    seen: dict[str, nn.Parameter] = {}
    for name, parameter in (item for chunk in chunks for item in parameters(chunk)):
        if seen.setdefault(name, parameter) is not parameter:
            raise _twice(name, "two chunks of a rank")
        named.setdefault(parameter, name)
    known = {masters.get(parameter, parameter) for parameter in named}
    for tensor in _worked_on(_optimizer(optimizer)):
        if tensor not in known:
            raise refuse("what the optimizer works on", "parameters of the chunks", f"another, {tuple(tensor.shape)}")
    for parameter, name in named.items():
        yield _Trained(name, parameter, masters.get(parameter, parameter), cuts.get(name))


def _optimizer(trains: Optimizer | MixedPrecision) -> Optimizer:
    return trains.optimizer if isinstance(trains, MixedPrecision) else trains


def _inside(trains: Optimizer | MixedPrecision) -> Optimizer:
    """Return what has the states of this rank: a ZeroRedundancyOptimizer has an optimizer of its share."""
    optimizer = _optimizer(trains)
    inside: Optimizer = getattr(optimizer, "optim", optimizer)
    return inside


def _worked_on(optimizer: Optimizer) -> Iterator[Tensor]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def _set_states(trains: Optimizer | MixedPrecision, states: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Give an optimizer these states of its tensors, in the way that it gets them from a `state_dict`."""
    optimizer = _optimizer(trains)
    numbered = count()
    groups = [{**group, "params": [next(numbered) for _ in group["params"]]} for group in optimizer.param_groups]
    numbers = {number: states[tensor] for number, tensor in enumerate(_worked_on(optimizer))}
    optimizer.load_state_dict({"state": numbers, "param_groups": groups})


def _buffers(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that belong to the state of the modules."""
    named = ((chunk.state_dict(), dict(chunk.named_buffers())) for chunk in chunks)
    return {plain(name): x for state, buffers in named for name, x in state.items() if name in buffers}


def _model(chunks: Sequence[nn.Module], trained: Sequence[_Trained], grid: Grid) -> dict[str, torch.Size]:
    """Return the shapes of all that the stages have together, by name; all ranks refuse alike what they name twice."""
    elsewhere = {name for chunk in chunks for name in copies(chunk)}
    mine = {name: full_shape(tensor, split) for name, _, tensor, split in trained}
    mine |= {name: x.shape for name, x in _buffers(chunks).items()}
    stages: list[Any] = [None] * grid.pp.size
    dist.all_gather_object(stages, {name: (shape, name in elsewhere) for name, shape in mine.items()}, grid.pp.group)
    owners: dict[str, int] = {}
    for rank, stage in enumerate(stages):
        for name in (name for name, (_, copied) in stage.items() if not copied):
            if owners.setdefault(name, rank) != rank:
                raise _twice(name, f"ranks {owners[name]} and {rank} of the pipeline")
    return {name: shape for stage in stages for name, (shape, _) in stage.items()}


def _twice(name: str, where: str) -> ArgumentError:
    return refuse("the names of parameters", "each in one stage, as in the full model", f"{name} on {where}")


def _check_model(path: Path, stored: Mapping[str, torch.Size], model: Mapping[str, torch.Size]) -> None:
    """Refuse a checkpoint of another model."""
    for name, shape in model.items():
        if name not in stored:
            raise refuse(f"the checkpoint {path}", f"one with {name}", f"one with {len(stored)} others")
        if stored[name] != shape:
            raise refuse(f"{name} in the checkpoint {path}", tuple(shape), tuple(stored[name]))
    if others := stored.keys() - model.keys():
        raise refuse(
            "the model", f"one with {min(others)}, as the checkpoint {path} has", f"one with {len(model)} others"
        )


def _placed(x: Tensor, split: Split | None, grid: Grid) -> Tensor:
    """Return `x` as what it is of the full model: a shard of it, without padding, over the tensor axis."""
    if split is None or grid.tp.size == 1:
        return x
    share, full = x.shape[split.dim], full_shape(x, split)
    start = min(grid.tp.rank * share, split.length)
    mine = x.narrow(split.dim, 0, min(share, split.length - start))
    stride = torch.empty(full, device="meta").stride()
    return DTensor.from_local(mine, grid.mesh["tp"], [Shard(split.dim)], shape=full, stride=stride)


def _number(name: str, number: float) -> Tensor:
    if not isinstance(number, int | float):
        raise refuse(f"the number {name!r}", "an int or a float", type(number).__name__)
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
