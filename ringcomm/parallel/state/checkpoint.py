"""Checkpoints that every grid can load, written by torch.distributed.checkpoint.

Tensors sharded over the tensor axis are passed to it as DTensors over that axis, the pieces of a ShardedOptimizer as
parts of the full tensor, all others as they are. So each element is written once, and a rank of any grid reads only
what it needs, in place; no tensor is gathered.

A parameter is stored under its name in the full model, a state of the optimizer as "name:key", its states that are no
tensors as "name:", and any other value as ":key".
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ringcomm.errors import RingcommError, describe_error, refuse
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import Modules, ShardSpec, as_list, full_shape, named_shards
from ringcomm.parallel.state.encoding import Extra, decode, encode
from ringcomm.parallel.state.full_names import check_model, full_shapes, named_buffers, refuse_duplicates
from ringcomm.parallel.state.host_memory import Folder
from ringcomm.parallel.state.offload import OffloadedOptimizer
from ringcomm.parallel.state.optimizers import optimized
from ringcomm.parallel.state.training import Training

__all__ = ["load_checkpoint", "save_checkpoint"]

SCALE, OPTIONS = "precision.", "options."  # prefixes of the values of a loss scale, and of groups of parameters
CLASS = "class"  # of the optimizer, beside the options of the groups

Stored = dict[str, TensorStorageMetadata]


def save_checkpoint(
    path: Folder, chunks: Modules, optimizer: Optimizer | Training, grid: Grid, extra: Mapping[str, Extra]
) -> None:
    """Save a model and its optimizer to the folder `path`. All ranks of the grid call it.

    Saved are parameters, buffers, optimizer states (with a ShardedOptimizer, or a `ZeroRedundancyOptimizer` over
    `grid.dp`, each replica saves its shard), the options of each group of parameters, such as the learning rate, the
    masters and loss scale of a MixedPrecision or ShardedOptimizer, and `extra`. Memory: a block at a time. Save
    between steps: gradients are not saved. Existing files in the folder are overwritten: use one folder per checkpoint,
    so that an interrupted save leaves the previous one intact.

    Args:
        path: a folder visible to all ranks
        chunks: this rank's modules
        optimizer: the optimizer of all or some of their parameters. A group has the same number on every rank.
        grid: the ranks
        extra: other values to save, the same on every rank: numbers, and state dicts of numbers, strings, tensors,
            lists and dicts

    Raises:
        ArgumentError: two stages have parameters of the same name that are not tied copies, or buffers of the same name
            that differ; the optimizer has parameters outside the chunks, or states that depend on the grid; an extra
            value is of another kind. All ranks raise.
        RingcommError: a rank cannot write its files. All ranks raise.
    """
    with grid.raise_on_all():
        chunks, training = as_list(chunks), _training(optimizer, grid)
        if not isinstance(extra, Mapping):
            raise refuse("extra", "a dict of values", repr(extra))
        training.copy_changes()
        extra = {**extra, **_values(training)}
        tensors = {f":{name}": encode(f"extra value {name!r}", value) for name, value in extra.items()}
        tensors |= dict(named_buffers(chunks))
        states = _local_optimizer(training).state
        for each in _all_held(chunks, training):
            tensors[each.name] = each.part(each.tensor.detach())
            tensors |= _saved_states(each, states.get(each.tensor, {}))
    full_shapes(chunks, grid, saving=True)
    with _torch_errors(path):
        save(tensors, checkpoint_id=path, process_group=grid.world.group)


def load_checkpoint(path: Folder, chunks: Modules, optimizer: Optimizer | Training, grid: Grid) -> dict[str, Any]:
    """Load a model and its optimizer from the folder `path`, and return the extra values saved with them.

    All ranks of the grid, which may differ from the one that saved, call it with the chunks of the same model and an
    optimizer of the same kind; it may have a ShardedOptimizer around it or not.

    Raises:
        ArgumentError: the folder has no checkpoint, or one of another model or class of optimizer. All ranks raise, and
            nothing is changed.
        RingcommError: a rank cannot read its files. All ranks raise; the model may be partly loaded.
    """
    with grid.raise_on_all():
        chunks, training = as_list(chunks), _training(optimizer, grid)
        training.copy_changes()  # which waits for parameters that are being gathered
        names, states = _stored(path)
        held = list(_all_held(chunks, training))
    check_model(path, {name: entry.size for name, entry in names.items()}, full_shapes(chunks, grid))
    values = _load_values(path, states[""], grid)
    scale, options = (_popped(values, prefix) for prefix in (SCALE, OPTIONS))
    with grid.raise_on_all():
        if (saved := options.pop(CLASS, {}).get("name")) != (mine := _class_name(training)):
            raise refuse(f"optimizer of checkpoint {path}", mine, saved)
    wanted, found = dict(named_buffers(chunks)), dict[Tensor, dict[str, Any]]()
    inner = _local_optimizer(training)
    local = set(optimized(inner))
    for each in held:
        wanted[each.name] = each.part(each.tensor.detach())
        rooms = _rooms(each, states[each.name], inner) if each.tensor in local else {}
        wanted |= {f"{each.name}:{key}": part for key, (_, part) in rooms.items()}
        if rooms:
            found[each.tensor] = {key: x for key, (x, _) in rooms.items()}
    with _torch_errors(path):
        load(wanted, checkpoint_id=path, process_group=grid.world.group)
    with torch.no_grad():
        for name, x in named_buffers(chunks):  # of which several chunks may have one
            x.copy_(wanted[name])
    for state in found.values():
        state.update(decode(state.pop("")) if "" in state else {})
    with grid.raise_on_all():
        _set_states(training.optimizer, found, options)
    training.scale.load_state_dict(scale)
    training.update_parameters()
    return values


class _Held(NamedTuple):
    """What this rank's optimizer has of a parameter, whose name is that in the full model."""

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    spec: ShardSpec | None
    training: Training

    def part(self, x: Tensor) -> Tensor:
        """Return the tensor, or a state of its shape, as part of the full one."""
        return self.training.part(x, self.parameter, self.spec)


def _training(optimizer: Optimizer | Training, grid: Grid) -> Training:
    return optimizer if isinstance(optimizer, Training) else Training(optimizer, grid)


def _all_held(chunks: list[nn.Module], training: Training) -> Iterator[_Held]:
    """Yield what is held of each parameter, unless that is an empty piece.

    Raises:
        ArgumentError: two parameters have one name, or the optimizer has others.
    """
    refuse_duplicates(chunks)
    held = [_Held(name, each, training.held(each), spec, training) for name, each, spec, _ in named_shards(chunks)]
    for tensor in {*optimized(training.optimizer)} - {each.tensor for each in held}:
        raise refuse("optimizer", "parameters of the chunks only", f"another, of shape {tuple(tensor.shape)}")
    yield from (each for each in held if each.tensor.numel() or not each.parameter.numel())


def _values(training: Training) -> dict[str, Extra]:
    """Return what is saved beside tensors: loss scale, class of the optimizer, options of its groups."""
    groups = enumerate(training.optimizer.param_groups)
    return {
        **{f"{SCALE}{name}": value for name, value in training.scale.state_dict().items()},
        f"{OPTIONS}{CLASS}": {"name": _class_name(training)},
        **{f"{OPTIONS}{n}": {name: x for name, x in group.items() if name != "params"} for n, group in groups},
    }


def _saved_states(held: _Held, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the states of a parameter, by their names in the checkpoint."""
    values = {key: x for key, x in state.items() if not isinstance(x, Tensor)}
    saved = {f"{held.name}:": encode(f"optimizer states of {held.name}", values)} if values else {}
    for key, x in ((key, x) for key, x in state.items() if key not in values):
        if held.spec and x.dim() and x.shape != held.tensor.shape:
            what = f"shape of the optimizer state {key} of {held.name}, which is sharded over tp"
            raise refuse(what, f"() or {tuple(held.tensor.shape)}", tuple(x.shape))
        saved[f"{held.name}:{key}"] = held.part(x) if x.shape == held.tensor.shape else x
    return saved


def _stored(path: Folder) -> tuple[Stored, defaultdict[str, Stored]]:
    """Return the entries of a checkpoint: by name, and those of states by name and key; values have no name."""
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, EOFError, UnpicklingError) as error:
        raise refuse("checkpoint folder", "one written by save_checkpoint", f"{path} ({error})") from error
    names, states = Stored(), defaultdict[str, Stored](dict)
    for full, entry in stored.items():
        name, colon, key = full.partition(":")
        if isinstance(entry, TensorStorageMetadata):
            (states[name] if colon else names)[key if colon else name] = entry
    return names, states


def _load_values(path: Folder, entries: Stored, grid: Grid) -> dict[str, Any]:
    encoded = {f":{name}": torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with _torch_errors(path):
        load(dict(encoded), checkpoint_id=path, process_group=grid.world.group)
    return {name[1:]: decode(value) for name, value in encoded.items()}


def _popped(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove and return the values whose names have this prefix, by the rest of their names."""
    return {name.removeprefix(prefix): values.pop(name) for name in [*values] if name.startswith(prefix)}


def _rooms(held: _Held, entries: Stored, optimizer: Optimizer) -> dict[str, tuple[Tensor, Tensor]]:
    """Return memory for each state, that of the optimizer if it has one, and the same as part of the full state."""
    full, rooms = full_shape(held.parameter, held.spec), {}
    for key, entry in entries.items():
        is_full = bool(key) and entry.size == full
        like = held.tensor.detach() if is_full else torch.empty(entry.size)
        x, dtype = optimizer.state.get(held.tensor, {}).get(key), entry.properties.dtype
        if not isinstance(x, Tensor) or (x.shape, x.dtype) != (like.shape, dtype):
            x = torch.zeros_like(like, dtype=dtype)
        rooms[key] = x, held.part(x) if is_full else x
    return rooms


@contextmanager
def _torch_errors(path: Folder) -> Iterator[None]:
    """Convert torch's error about files, which it raises on all ranks, to a RingcommError."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        if not isinstance(failure, Exception):  # an interrupt
            raise
        raise RingcommError(f"checkpoint {path}: rank {rank} failed: {describe_error(failure)}", rank=rank) from error


def _local_optimizer(training: Training) -> Optimizer:
    """Return the optimizer with this rank's states, which a ZeroRedundancyOptimizer wraps."""
    local: Optimizer = getattr(training.optimizer, "optim", training.optimizer)
    return local


def _class_name(training: Training) -> str:
    """Return the name of the class of an optimizer, without those around it."""
    local = _local_optimizer(training)
    return type(local.inner if isinstance(local, OffloadedOptimizer) else local).__name__


def _set_states(optimizer: Optimizer, states: Mapping[Tensor, dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Load the states, and the options of each group, into an optimizer, in the form of its `state_dict`."""
    numbered, groups = count(), []
    for number, group in enumerate(optimizer.param_groups):
        groups.append({**group, **options.get(str(number), {}), "params": [next(numbered) for _ in group["params"]]})
    by_number = {number: states[tensor] for number, tensor in enumerate(optimized(optimizer)) if tensor in states}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
