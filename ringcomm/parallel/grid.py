"""Who works with whom: the ranks of the world as a grid of three axes."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.errors import ArgumentError, integer, refuse

__all__ = ["Axis", "Grid"]


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that share all coordinates of this rank but one.

    Attributes:
        name: what they do together: "dp", "tp", "pp", or a group of several axes
        size: how many they are
        rank: this rank's place among them
        ranks: their ranks in the world, in order
        group: their group of torch.distributed
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup = field(repr=False)

    def share(self, what: str, number: int) -> int:
        """Return the share of one rank in `number` things, or refuse a number that cannot be shared evenly."""
        if number % self.size:
            raise refuse(what, f"a multiple of {self.name} = {self.size}", number)
        return number // self.size


class Grid:
    """The world as `pp` pipeline stages of `dp` replicas of `tp` parts each.

    Ranks are counted through the axis `tp` first, then `dp`, then `pp`: (stage · dp + replica) · tp + part. So the
    ranks that talk most are neighbours, and only the boundaries of stages lie between distant ones. All ranks make the
    same Grid in the same order, after `torch.distributed.init_process_group`.

    Attributes, each an Axis:
        dp: the replicas of this rank's part, which average their gradients
        tp: the parts of this rank's layers
        pp: the stages of this rank's pipeline, in order
        model: all that holds one replica of the model, tp × pp
        world: all ranks
        ends: the first and the last stage of this rank's pipeline, which share tied weights; others are alone
    and
        mesh: the axes pp, dp, tp as a DeviceMesh of the same groups, for what torch builds on one
        device: where the model lives; of GPUs, the current one

    Args:
        dp, tp, pp: the sizes, whose product is the size of the world
        device: the type of device that the model lives on
        timeout: of each call on the groups of the grid, for ranks that live but do not come; None is torch's default
            (half an hour, of NCCL less), whatever `init_process_group` was given

    Raises:
        ArgumentError: there is no default group yet, or the product is not its size.
    """

    def __init__(
        self, dp: int = 1, tp: int = 1, pp: int = 1, *, device: str = "cpu", timeout: timedelta | None = None
    ) -> None:
        _check_started()
        dp, tp, pp = integer("dp", dp, 1), integer("tp", tp, 1), integer("pp", pp, 1)
        if dp * tp * pp != dist.get_world_size():
            product = f"dp {dp} · tp {tp} · pp {pp} = {dp * tp * pp}"
            raise refuse("the size of the grid", f"that of the world, {dist.get_world_size()}", product)
        ranks = torch.arange(dp * tp * pp).reshape(pp, dp, tp)
        pipelines = ranks.flatten(1).T.tolist()
        alone: dict[int, dist.ProcessGroup] = {}
        axis = partial(_axis, timeout=timeout, alone=alone)
        self.pp = axis("pp", pipelines)
        self.dp = axis("dp", ranks.movedim(1, 2).flatten(0, 1).tolist())
        self.tp = axis("tp", ranks.flatten(0, 1).tolist())
        self.model = axis("model", ranks.movedim(1, 0).flatten(1).tolist())
        self.world = axis("world", ranks.reshape(1, -1).tolist())
        self.ends = axis("ends", [part for line in pipelines for part in _ends_apart(line)])
        groups = [self.pp.group, self.dp.group, self.tp.group]
        self.mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("pp", "dp", "tp"))
        self.device = torch.device(device)

    @classmethod
    def alone(cls, device: str = "cpu") -> "Grid":
        """Return a grid of this rank only, which needs no other rank: for a model to compare with, or to try."""
        _check_started()
        grid = cls.__new__(cls)
        rank = dist.get_rank()
        group = dist.new_group([rank], use_local_synchronization=True)
        for name in ("pp", "dp", "tp", "model", "world", "ends"):
            setattr(grid, name, Axis(name, 1, 0, (rank,), group))
        names = ("pp", "dp", "tp")
        grid.mesh = DeviceMesh.from_group([group] * 3, device, torch.tensor([[[rank]]]), mesh_dim_names=names)
        grid.device = torch.device(device)
        return grid

    def abort(self) -> None:
        """End what passes the groups of this rank, whose ranks raise an error then; nothing can pass them any more."""
        for axis in (self.pp, self.dp, self.tp, self.model, self.world, self.ends):
            axis.group.abort()

    def __repr__(self) -> str:
        return f"Grid(dp={self.dp.size}, tp={self.tp.size}, pp={self.pp.size})"


def _check_started() -> None:
    if not dist.is_initialized():
        raise ArgumentError("there are no ranks yet: call torch.distributed.init_process_group before Grid")


def _axis(name: str, lines: list[list[int]], *, timeout: timedelta | None, alone: dict[int, dist.ProcessGroup]) -> Axis:
    """Make a group of each line of ranks, and return the one that this rank is in.

    A rank that is alone on several axes has one group for all of them, kept in `alone`: nothing passes it.
    """
    rank, found = dist.get_rank(), None
    for line in lines:
        group = alone.get(line[0]) if len(line) == 1 else None
        group = group or dist.new_group(line, timeout=timeout, group_desc=name)
        if len(line) == 1:
            alone[line[0]] = group
        if rank in line:
            found = Axis(name, len(line), line.index(rank), tuple(line), group)
    assert found, "every rank is in one line"
    return found


def _ends_apart(line: list[int]) -> list[list[int]]:
    """Cut a pipeline into its two ends and every rank in between, each a line of its own."""
    return [[line[0], line[-1]], *([rank] for rank in line[1:-1])] if len(line) > 1 else [line]
