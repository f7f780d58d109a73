"""The states of this rank's pieces by the names of the full model: for torch.distributed.checkpoint, or in place."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringcomm.errors import refuse
from ringcomm.parallel.data.zero.checkpoint_parts import paired_blocks
from ringcomm.parallel.data.zero.full_states import MASTER
from ringcomm.parallel.sharding import Modules, named_shards
from ringcomm.parallel.state.training import Training

__all__ = ["create_states", "load_sharded_states", "sharded_states"]


def sharded_states(training: Training, chunks: Modules) -> dict[str, Any]:
    """Return masters and states of the pieces as parts of those of the full model, and the options of their groups."""
    masters, states = {}, {}
    optimizer = training.optimizer
    for name, parameter, spec, _ in named_shards(chunks):
        piece = training.held(parameter)
        if piece is not parameter and piece.numel():
            masters[name] = training.part(piece.detach(), parameter, spec)
            states[name] = {
                key: training.part(x, parameter, spec) if isinstance(x, Tensor) and x.shape == piece.shape else x
                for key, x in optimizer.state.get(piece, {}).items()
            }
    groups = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"masters": masters, "state": states, "param_groups": groups}


def load_sharded_states(training: Training, chunks: Modules, state: Mapping[str, Any]) -> None:
    """Load what `sharded_states` has returned. Tensors may have been loaded in place, or be copies.

    Raises:
        ArgumentError: it has other groups, states or pieces. All ranks raise, and nothing changes.
    """
    own = _by_name_and_key(sharded_states(training, chunks))
    pieces = {each.name: training.held(each.parameter) for each in named_shards(chunks)}
    groups, options = training.optimizer.param_groups, state["param_groups"]
    blocks, others = [], []
    with training.grid.raise_on_all():
        if len(groups) != len(options):
            raise refuse("groups of parameters", len(groups), len(options))
        for (name, key), x in _by_name_and_key(state).items():
            mine = own.get((name, key))
            if isinstance(x, Tensor) and isinstance(mine, Tensor):
                blocks += paired_blocks(f"{key} of {name}", mine, x)
            elif (isinstance(x, Tensor) and x.dim()) or name not in pieces:
                raise refuse("states", "those that this object has, after create_states or a step", f"{key} of {name}")
            else:
                others.append((pieces[name], key, x))
    for target, source in blocks:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    for piece, key, x in others:
        training.optimizer.state[piece][key] = x
    for group, new in zip(groups, options, strict=True):
        group.update(new)


def create_states(optimizer: Optimizer, pieces: Iterable[nn.Parameter]) -> None:
    """Give an optimizer the states of a step with gradients of zero for the pieces that have none."""
    missing = [x for x in pieces if x.numel() and not optimizer.state.get(x)]
    before = [piece.detach().clone() for piece in missing]  # weight decay moves them
    for piece in missing:
        piece.grad = torch.zeros_like(piece)
    optimizer.step()
    for piece, value in zip(missing, before, strict=True):
        piece.grad = None
        piece.data.copy_(value)


def _by_name_and_key(state: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the states and masters of all parameters, by the name of the parameter and the key of the state."""
    found = {(name, key): x for name, values in state["state"].items() for key, x in values.items()}
    return found | {(name, MASTER): x for name, x in state["masters"].items()}
