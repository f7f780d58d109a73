"""Checkpoints that every grid can load, written by torch.distributed.checkpoint.

Tensors sharded over the tensor axis are passed to it as DTensors over that axis, the pieces of a ShardedOptimizer as
parts of the full tensor, all others as they are. So each element is written once, and a rank of any grid reads only
what it needs, in place; no tensor is gathered.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from io import BytesIO
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
from torch.optim import Optimizer

from ringcomm.errors import ArgumentError, RingcommError, describe_error, refuse
from ringcomm.parallel.data.zero.sharded_optimizer import ShardedOptimizer
from ringcomm.parallel.data.zero.states import optimized
from ringcomm.parallel.grid import Grid
from ringcomm.parallel.sharding import (
    Modules,
    ShardSpec,
    as_dtensor,
    as_list,
    clean_name,
    full_shape,
    named_shards,
    tied_copies,
)
from ringcomm.parallel.state.host_memory import Folder
from ringcomm.parallel.state.offload import OffloadedOptimizer
from ringcomm.parallel.state.precision import MixedPrecision

__all__ = ["Folder", "load_checkpoint", "save_checkpoint"]

Training = Optimizer | MixedPrecision | ShardedOptimizer
Extra = float | Mapping[str, Any]
COPY, PARAMETER = "tied copy", "parameter"  # what a name is; else it is a buffer
PRECISION, OPTIONS = "precision.", "options."  # prefixes of the values of MixedPrecision, and of groups of parameters
CLASS = "class"  # of the optimizer, beside the options of the groups
SCHEDULED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}  # options that torch's schedulers add


def save_checkpoint(path: Folder, chunks: Modules, optimizer: Training, grid: Grid, extra: Mapping[str, Extra]) -> None:
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
        chunks = as_list(chunks)
        if not isinstance(extra, Mapping):
            raise refuse("extra", "a dict of values", repr(extra))
        if not isinstance(optimizer, Optimizer):
            optimizer.copy_changes()
            extra = {**extra, **{PRECISION + name: value for name, value in optimizer.scale.state_dict().items()}}
        extra = {**extra, f"{OPTIONS}{CLASS}": {"name": _kind(optimizer)}}
        for number, group in enumerate(_torch_optimizer(optimizer).param_groups):
            extra = {**extra, f"{OPTIONS}{number}": {name: group[name] for name in group if name != "params"}}
        encoded = {f":{name}": _encoded(f"extra value {name!r}", value) for name, value in extra.items()}
        tensors = encoded | dict(_buffers(chunks))
        states, trained = _local_optimizer(optimizer).state, list(_trained(chunks, optimizer, grid))
        for name, _, tensor, spec, part in (each for each in trained if each.is_held):
            tensors[name] = part(tensor.detach())
            state = states.get(tensor, {})
            if values := {key: x for key, x in state.items() if not isinstance(x, Tensor)}:
                tensors[f"{name}:"] = _encoded(f"optimizer states of {name}", values)
            for key, value in ((key, x) for key, x in state.items() if key not in values):
                same = value.shape == tensor.shape
                if spec and value.dim() and not same:
                    what = f"shape of the optimizer state {key} of {name}, which is sharded over tp"
                    raise refuse(what, f"() or {tuple(tensor.shape)}", tuple(value.shape))
                tensors[f"{name}:{key}"] = part(value) if same else value
    _model(chunks, trained, grid, saving=True)
    with _torch_errors(path):
        save(tensors, checkpoint_id=path, process_group=grid.world.group)


def load_checkpoint(path: Folder, chunks: Modules, optimizer: Training, grid: Grid) -> dict[str, Any]:
    """Load a model and its optimizer from the folder `path`, and return the extra values saved with them.

    All ranks of the grid, which may differ from the one that saved, call it with the chunks of the same model and an
    optimizer of the same kind; it may have a ShardedOptimizer around it or not.

    Raises:
        ArgumentError: the folder has no checkpoint, or one of another model or class of optimizer. All ranks raise, and
            nothing is changed.
        RingcommError: a rank cannot read its files. All ranks raise; the model may be partly loaded.
    """
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.finish_param_sync()
    with grid.raise_on_all():
        chunks = as_list(chunks)
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
        except (OSError, EOFError, UnpicklingError) as error:
            raise refuse("checkpoint folder", "one written by save_checkpoint", f"{path} ({error})") from error
        trained, wanted = list(_trained(chunks, optimizer, grid)), dict(_buffers(chunks))
    sizes: dict[str, torch.Size] = {}
    saved: dict[str, dict[str, TensorStorageMetadata]] = defaultdict(dict)  # states by parameter; extra values under ""
    for key, entry in stored.items():
        name, colon, state = key.partition(":")
        if isinstance(entry, TensorStorageMetadata) and colon:
            saved[name][state] = entry  # its values that are no tensors are under ""
        elif isinstance(entry, TensorStorageMetadata):
            sizes[name] = entry.size
    _check_model(path, sizes, _model(chunks, trained, grid))
    encoded = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved[""].items()}
    with _torch_errors(path):
        load({f":{name}": value for name, value in encoded.items()}, checkpoint_id=path, process_group=grid.world.group)
    values = {name: _decoded(value) for name, value in encoded.items()}
    scale, options = (_popped(values, prefix) for prefix in (PRECISION, OPTIONS))
    with grid.raise_on_all():
        _check_optimizer(path, options, optimizer)
    states: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    inner = _local_optimizer(optimizer)
    local = set(optimized(inner))
    for name, _, tensor, _, part in (each for each in trained if each.is_held):
        wanted[name] = part(tensor.detach())
        for state, entry in saved[name].items() if tensor in local else ():
            same = bool(state) and entry.size == sizes[name]
            like = tensor.detach() if same else torch.empty(entry.size)
            found, dtype = inner.state.get(tensor, {}).get(state), entry.properties.dtype
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (like.shape, dtype):
                found = torch.zeros_like(like, dtype=dtype)
            states[tensor][state] = found
            wanted[f"{name}:{state}"] = part(found) if same else found
    with _torch_errors(path):
        load(wanted, checkpoint_id=path, process_group=grid.world.group)
    with torch.no_grad():
        for _, parameter, tensor, *_ in trained if isinstance(optimizer, MixedPrecision) else ():
            parameter.copy_(tensor)
        for name, x in _buffers(chunks):  # of which several chunks may have one
            x.copy_(wanted[name])
    for each in states.values():
        if "" in each:
            each.update(_decoded(each.pop("")))
    with grid.raise_on_all():
        _set_states(optimizer, states, options)
    if not isinstance(optimizer, Optimizer):
        optimizer.scale.load_state_dict(scale)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.gather()
    return values


def _popped(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove and return the values whose names have this prefix, by the rest of their names."""
    return {name.removeprefix(prefix): values.pop(name) for name in [*values] if name.startswith(prefix)}


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


class _Trained(NamedTuple):
    """A parameter: its name in the full model, the tensor that the optimizer has for it, and its sharding.

    `part` returns the tensor, or a state of its shape, as part of the full one.
    """

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    spec: ShardSpec | None
    part: Callable[[Tensor], Tensor]

    @property
    def is_held(self) -> bool:
        """Whether this rank has elements of the parameter, or the parameter has none."""
        return self.tensor.numel() > 0 or self.parameter.numel() == 0


def _trained(chunks: Sequence[nn.Module], optimizer: Training, grid: Grid) -> Iterator[_Trained]:
    masters: Mapping[nn.Parameter, Tensor] = {}
    if isinstance(optimizer, MixedPrecision):
        masters = dict(zip(optimizer.parameters, optimizer.masters, strict=True))
    elif isinstance(optimizer, ShardedOptimizer):
        masters = {parameter: optimizer.shard(parameter) for parameter in optimizer.parameters}
    shards, named = list(named_shards(chunks)), dict[str, nn.Parameter]()
    for name, parameter, _ in shards:
        if named.setdefault(name, parameter) is not parameter:
            raise _duplicate(name, "two chunks of a rank")
    known = {masters.get(parameter, parameter) for parameter in named.values()}
    for tensor in optimized(_torch_optimizer(optimizer)):
        if tensor not in known:
            raise refuse("optimizer", "parameters of the chunks only", f"another, of shape {tuple(tensor.shape)}")
    for name, parameter, spec in shards:
        part = partial(as_dtensor, spec=spec, tp=grid.tp)
        if isinstance(optimizer, ShardedOptimizer):
            part = partial(optimizer.part, parameter=parameter, spec=spec)
        yield _Trained(name, parameter, masters.get(parameter, parameter), spec, part)


def _torch_optimizer(optimizer: Training) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer


def _local_optimizer(optimizer: Training) -> Optimizer:
    """Return the optimizer with this rank's states, which a ZeroRedundancyOptimizer wraps."""
    outer = _torch_optimizer(optimizer)
    local: Optimizer = getattr(outer, "optim", outer)
    return local


def _kind(optimizer: Training) -> str:
    """Return the name of the class of an optimizer, without those around it."""
    local = _local_optimizer(optimizer)
    return type(local.inner if isinstance(local, OffloadedOptimizer) else local).__name__


def _set_states(
    trains: Training,
    states: Mapping[Tensor, dict[str, Tensor]],
    options: Mapping[str, dict[str, Any]],
) -> None:
    """Load the states, and the options of each group, into an optimizer, in the form of its `state_dict`."""
    optimizer = _torch_optimizer(trains)
    numbered, groups = count(), []
    for number, group in enumerate(optimizer.param_groups):
        groups.append({**group, **options.get(str(number), {}), "params": [next(numbered) for _ in group["params"]]})
    by_number = {number: states[tensor] for number, tensor in enumerate(optimized(optimizer)) if tensor in states}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _buffers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers of the modules."""
    for chunk in chunks:
        buffers = dict(chunk.named_buffers())
        yield from ((clean_name(name), x) for name, x in chunk.state_dict().items() if name in buffers)


def _model(
    chunks: Sequence[nn.Module], trained: Sequence[_Trained], grid: Grid, *, saving: bool = False
) -> dict[str, torch.Size]:
    """Return the shapes of all parameters and buffers of the model; all ranks raise if a name is not unique.

    Stages may have a buffer in common, such as a mask, whose values are then equal.
    """
    elsewhere = {name for chunk in chunks for name in tied_copies(chunk)}
    mine: dict[str, tuple[torch.Size, str]] = {}
    with grid.raise_on_all():
        for name, parameter, _, spec, _ in trained:
            mine[name] = full_shape(parameter, spec), COPY if name in elsewhere else PARAMETER
        for name, x in _buffers(chunks):
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


def _digest(x: Tensor) -> str:
    return sha256(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _duplicate(name: str, where: str) -> ArgumentError:
    return refuse("names", "each in one stage, as in the full model, or equal buffers", f"{name} on {where}")


def _check_model(path: Folder, stored: Mapping[str, torch.Size], model: Mapping[str, torch.Size]) -> None:
    """Raise if the checkpoint is of another model."""
    if stored.keys() != model.keys():
        only = {"without": model.keys() - stored.keys(), "but with": stored.keys() - model.keys()}
        found = [f"{word} {min(names)} and {len(names) - 1} more" for word, names in only.items() if names]
        expected = f"the {len(model)} parameters of this model"
        raise refuse(f"checkpoint {path}", expected, f"{len(stored)}, {', '.join(found)}")
    for name, shape in model.items():
        if stored[name] != shape:
            raise refuse(f"{name} in checkpoint {path}", tuple(shape), tuple(stored[name]))


def _check_optimizer(path: Folder, options: Mapping[str, dict[str, Any]], optimizer: Training) -> None:
    """Raise if the checkpoint is of an optimizer of another class.

    Those of early versions do not name it: they are of another if it and this one have options that the other lacks.
    """
    what, mine = f"optimizer of checkpoint {path}", _kind(optimizer)
    saved, known = {**options}, _local_optimizer(optimizer).defaults.keys()
    found = saved.pop(CLASS, {}).get("name")
    if found not in (None, mine):
        raise refuse(what, mine, found)
    for group in () if found else saved.values():
        if (missing := known - group.keys()) and (others := group.keys() - known - SCHEDULED):
            raise refuse(what, f"{mine}, with {min(missing)}", f"one with {', '.join(sorted(others))}")


def _encoded(name: str, value: Extra) -> Tensor:
    """Return a value as a tensor: a number as a scalar, a dict as the bytes of its file."""
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if not isinstance(value, Mapping):
        raise refuse(name, "an int, a float or a dict", type(value).__name__)
    file = BytesIO()
    torch.save(dict(value), file)
    found = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    try:
        _decoded(found)
    except UnpicklingError as error:
        raise refuse(name, "numbers, strings, tensors, lists and dicts", error) from error
    return found


def _decoded(value: Tensor) -> Any:
    return torch.load(BytesIO(value.numpy().tobytes()), weights_only=True) if value.dim() else value.item()
