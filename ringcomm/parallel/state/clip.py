"""Gradient norm and clipping of a sharded model."""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_reduced
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.sharding import Modules, as_list, counted_parameters, expert_axes, local_part

__all__ = ["clip_factor", "clip_grad_norm", "grad_norm", "local_norm"]


def grad_norm(chunks: Modules, grid: Grid) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole model, on every rank.

    Replicated and tied parameters count once. Gradients must be final: averaged over `dp`, tied ones summed. Each norm
    is computed in float32 (float64 for float64), and they are combined in float64.

    Communication: all-reduce of one number over tp × pp; for experts also one over ep; for DTensors, as those of
    `fully_shard`, also one over each dimension of their mesh along which they are sharded.

    Raises:
        ArgumentError: a gradient is a DTensor of partial sums, or an expert's and sharded over `ep`. The groups of the
            grid are aborted, so that all ranks raise.
    """
    chunks = as_list(chunks)
    counted, experts = counted_parameters(chunks, grid.tp), expert_axes(chunks)
    norms: dict[tuple[tuple[dist.ProcessGroup, ...], bool, bool], list[torch.Tensor]] = defaultdict(list)
    with grid.abort_on_error():
        for parameter, grad in _gradients(chunks):
            groups, expert = _sharding_groups(grad), parameter in experts
            if expert and any(_overlap(group, grid.ep) for group in groups):
                raise refuse("gradient of an expert", "one sharded over ranks of edp", f"one sharded over {grid.ep}")
            if groups or parameter in counted:  # all ranks of the groups take part, even if they do not count it
                norms[groups, expert, parameter in counted].append(local_norm(local_part(grad)))
        squares = torch.zeros(2, dtype=torch.float64, device=grid.device)  # of the experts, and of all others
        for (groups, expert, counts), parts in norms.items():
            partial = torch.stack(parts).square().sum()
            for group in groups:
                dist.all_reduce(partial, group=group)
            if counts:
                squares[0 if expert else 1] += partial
        if experts:
            squares[0] = all_reduced(squares[0], grid.ep)
        return all_reduced(squares.sum(), grid.model).sqrt()


def clip_grad_norm(chunks: Modules, grid: Grid, max_norm: float) -> torch.Tensor:
    """Scale the gradients to norm `max_norm` if theirs is larger, and return their norm before.

    The counterpart of `torch.nn.utils.clip_grad_norm_`. Communication: that of `grad_norm`.

    Raises:
        ArgumentError: `max_norm` is negative or nan.
    """
    chunks = as_list(chunks)
    norm = grad_norm(chunks, grid)
    factor = clip_factor(norm, max_norm)
    for _, grad in _gradients(chunks):
        local, wide = local_part(grad), _wide(grad)  # the factor itself may underflow in 16 bits
        local.copy_(local.to(wide) * factor.to(wide))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor for gradients of this norm."""
    if not max_norm >= 0:
        raise refuse("max_norm", "at least 0", max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _gradients(chunks: list[nn.Module]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield the parameters that have a gradient, each once, with the gradient."""
    for parameter in nn.ModuleList(chunks).parameters():
        if parameter.grad is not None:
            yield parameter, parameter.grad


def _sharding_groups(x: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over whose ranks a DTensor is sharded."""
    if not isinstance(x, DTensor):
        return ()
    if any(place.is_partial() for place in x.placements):
        raise refuse("gradient", "a final one", f"a DTensor of partial sums, {x.placements}")
    return tuple(x.device_mesh.get_group(dim) for dim, place in enumerate(x.placements) if not place.is_replicate())


def _overlap(group: dist.ProcessGroup, axis: Axis) -> bool:
    """Return whether another rank of the axis is in the group."""
    return len({*dist.get_process_group_ranks(group)}.intersection(axis.ranks)) > 1


def local_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of this rank's tensor in float64, computed in float32 or more."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=_wide(x))
    return norm.double()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
