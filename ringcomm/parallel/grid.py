"""The device grid: the ranks of the world along three axes, data, tensor and pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.errors import ArgumentError, describe_error, integer, refuse

__all__ = ["Axis", "Grid"]

AXES = ("pp", "dp", "tp", "model", "world", "ends")  # the first three are those of the mesh


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that differ from this rank along one axis of a grid.

    Attributes:
        name: "dp", "tp", "pp", or the name of a combination of axes
        size: number of ranks
        rank: this rank's index on the axis
        ranks: global ranks, in order
        group: the process group
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup = field(repr=False)

    def __deepcopy__(self, memo: object) -> "Axis":
        """Return the same axis: copies of a layer communicate on its group."""
        return self

    def divide(self, what: str, number: int) -> int:
        """Return `number` divided by the size of the axis.

        Raises:
            ArgumentError: `number` is not a multiple of the size; `what` names it in the message.
        """
        if number % self.size:
            raise refuse(what, f"a multiple of {self.name} = {self.size}", number)
        return number // self.size


class Grid:
    """The world as `pp` pipeline stages × `dp` replicas × `tp` shards, a context manager that closes its groups.

    Ranks are numbered along `tp` first, then `dp`, then `pp`: (stage · dp + replica) · tp + shard. So the ranks that
    communicate most are neighbors, and only stage boundaries span distant ranks. All ranks construct the same grids in
    the same order, after `torch.distributed.init_process_group`.

    Args:
        dp: number of replicas of the model
        tp: number of shards of each layer
        pp: number of pipeline stages; dp · tp · pp is the size of the world
        device: device type of the model
        timeout: timeout of every operation on the groups of the grid. None: torch's default (30 minutes; NCCL: 10),
            whatever `init_process_group` was given.

    Attributes:
        dp: `Axis` of the replicas of this rank's shard, which average their gradients
        tp: `Axis` of the shards of this rank's layers
        pp: `Axis` of this rank's pipeline stages, in order
        model: `Axis` of one replica of the model, tp × pp
        world: `Axis` of all ranks
        ends: `Axis` of the first and last stage of this rank's pipeline, which share tied weights (the embedding group
            of Megatron-LM); a stage between them is alone
        mesh: `DeviceMesh` of the same groups, with dimensions "pp", "dp", "tp"
        device: device of the model; with GPUs, the current one

    Raises:
        ArgumentError: there is no default process group, or dp · tp · pp is not its size.
    """

    def __init__(
        self, dp: int = 1, tp: int = 1, pp: int = 1, *, device: str = "cpu", timeout: timedelta | None = None
    ) -> None:
        _check_started()
        dp, tp, pp = integer("dp", dp, 1), integer("tp", tp, 1), integer("pp", pp, 1)
        if dp * tp * pp != dist.get_world_size():
            product = f"dp {dp} · tp {tp} · pp {pp} = {dp * tp * pp}"
            raise refuse("size of the grid", f"that of the world, {dist.get_world_size()}", product)
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
        self.mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=AXES[:3])
        self.device = torch.device(device)

    @classmethod
    def alone(cls, device: str = "cpu") -> "Grid":
        """Return a grid of this rank only, without involving other ranks: for a reference model."""
        _check_started()
        grid = cls.__new__(cls)
        rank = dist.get_rank()
        group = dist.new_group([rank], use_local_synchronization=True)
        for name in AXES:
            setattr(grid, name, Axis(name, 1, 0, (rank,), group))
        grid.mesh = DeviceMesh.from_group([group] * 3, device, torch.tensor([[[rank]]]), mesh_dim_names=AXES[:3])
        grid.device = torch.device(device)
        return grid

    def abort(self) -> None:
        """Abort all groups of this rank: pending and later operations raise on their ranks."""
        for name in AXES:
            getattr(self, name).group.abort()

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Abort the peers if this rank fails inside the block, so that none waits for a message that never arrives."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise on all ranks if one fails inside the block, which must not communicate."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = [""] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(failures, describe_error(failure), group=self.world.group)
        if failure:
            raise failure
        for rank, text in zip(self.world.ranks, failures, strict=True):
            if text:
                raise ArgumentError(f"rank {rank} failed: {text}")

    def close(self) -> None:
        """Destroy all groups of this rank and free their sockets and memory. Every rank calls it; twice does no harm.

        Models, layers and pipelines on the grid cannot communicate afterwards. (Gloo frees a group only once nothing
        refers to it.)
        """
        for group in dict.fromkeys(getattr(self, name).group for name in AXES):
            with suppress(ValueError):  # torch's, if it is already destroyed
                dist.destroy_process_group(group)

    def __enter__(self) -> "Grid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Grid(dp={self.dp.size}, tp={self.tp.size}, pp={self.pp.size})"


def _check_started() -> None:
    if not dist.is_initialized():
        raise ArgumentError("no default process group: call torch.distributed.init_process_group before Grid")


def _axis(name: str, lines: list[list[int]], *, timeout: timedelta | None, alone: dict[int, dist.ProcessGroup]) -> Axis:
    """Create a process group for each line of ranks, and return this rank's.

    A rank that is alone on several axes shares one group among them, kept in `alone`: it carries no messages.
    """
    rank, found = dist.get_rank(), None
    for line in lines:
        group = alone.get(line[0]) if len(line) == 1 else None
        group = group or dist.new_group(line, timeout=timeout, group_desc=name)
        if len(line) == 1:
            alone[line[0]] = group
        if rank in line:
            found = Axis(name, len(line), line.index(rank), tuple(line), group)
    assert found
    return found


def _ends_apart(line: list[int]) -> list[list[int]]:
    """Divide a pipeline into the line of its two ends and a line for every rank between them."""
    return [[line[0], line[-1]], *([rank] for rank in line[1:-1])] if len(line) > 1 else [line]
