"""The device grid: the ranks of the world along the axes of parallelism."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.errors import ArgumentError, encode_error, failure_on, integer, raise_first_failure, refuse
from ringcomm.layout_rules import check
from ringcomm.torch.timeouts import timeout_of

__all__ = ["Axis", "Grid", "on_error"]

MESH = ("pp", "dp", "cp", "tp")  # the dimensions of the mesh
AXES = (*MESH, "dp_cp", "ep", "edp", "model", "world", "ends")


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that differ from this rank along one axis of a grid.

    Attributes:
        name: "dp", "cp", "tp", "pp", or the name of a combination of axes
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
    """The world as `pp` stages × `dp` replicas × `cp` parts of a sequence × `tp` shards.

    A context manager that closes its groups. Ranks are numbered along `tp` first, then `cp`, `dp` and `pp`. So the
    ranks that communicate most are neighbors, and only stage boundaries span distant ranks. All ranks construct the
    same grids in the same order, after `torch.distributed.init_process_group`.

    Args:
        dp: number of replicas of the model
        tp: number of shards of each layer
        pp: number of pipeline stages
        cp: number of parts of each sequence (context parallelism); dp · cp · tp · pp is the size of the world
        ep: number of shards of each set of experts, a divisor of `dp`: neighboring replicas hold one each
        device: device type of the model
        timeout: timeout of every operation on the groups of the grid. None: that of `init_process_group`

    Attributes:
        dp: `Axis` of the replicas that get other rows of a batch
        cp: `Axis` of the ranks that hold the parts of this rank's sequences
        tp: `Axis` of the shards of this rank's layers
        pp: `Axis` of this rank's pipeline stages, in order
        dp_cp: `Axis` of the ranks with this rank's parameters, dp × cp, which average their gradients
        ep: `Axis` of the replicas that together hold each expert once
        edp: `Axis` of the ranks with this rank's experts, dp · cp / ep of them
        model: `Axis` of one replica of the model, tp × pp
        world: `Axis` of all ranks
        ends: `Axis` of the first and last stage of this rank's pipeline, which have the tied weights (the embedding
            group of Megatron-LM); a stage between them is alone
        mesh: `DeviceMesh` of the same groups, with dimensions "pp", "dp", "cp", "tp"
        device: device of the model; with GPUs, the current one

    Raises:
        ArgumentError: there is no default process group, dp · cp · tp · pp is not its size, or `ep` does not divide
            `dp`.
    """

    def __init__(
        self,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        *,
        cp: int = 1,
        ep: int = 1,
        device: str = "cpu",
        timeout: timedelta | None = None,
    ) -> None:
        _check_started()
        sizes = {name: integer(name, size, 1) for name, size in zip(MESH, (pp, dp, cp, tp), strict=True)}
        if prod(sizes.values()) != dist.get_world_size():
            product = " · ".join(f"{name} {size}" for name, size in sizes.items())
            got = f"{product} = {prod(sizes.values())}"
            raise refuse("size of the grid", f"that of the world, {dist.get_world_size()}", got)
        check(ep=integer("ep", ep, 1), dp=dp)
        ranks = torch.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp)
        experts = ranks.reshape(pp, dp // ep, ep, cp, tp)
        pipelines = _lines(ranks, 0)
        axis = partial(_axis, timeout=timeout or timeout_of(None, device), alone={})
        self.pp = axis("pp", pipelines)
        self.dp = axis("dp", _lines(ranks, 1))
        self.cp = axis("cp", _lines(ranks, 2))
        self.tp = axis("tp", _lines(ranks, 3))
        self.dp_cp = axis("dp_cp", _lines(ranks, 1, 2)) if cp > 1 else replace(self.dp, name="dp_cp")
        self.ep = axis("ep", _lines(experts, 2))
        self.edp = axis("edp", _lines(experts, 1, 3)) if ep > 1 else replace(self.dp_cp, name="edp")
        self.model = axis("model", _lines(ranks, 0, 3))
        self.world = axis("world", _lines(ranks, 0, 1, 2, 3))
        self.ends = axis("ends", [part for line in pipelines for part in _ends_apart(line)])
        groups = [getattr(self, name).group for name in MESH]
        self.mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=MESH)
        self.device = torch.device(device)

    @classmethod
    def parse(cls, sizes: str, *, device: str = "cpu", timeout: timedelta | None = None) -> "Grid":
        """Return the grid of a string such as "dp=2,tp=2,cp=2"; other axes have one rank.

        Raises:
            ArgumentError: the string has another form, or see `Grid`.
        """
        found: dict[str, int] = {}
        for part in sizes.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            if name not in (*MESH, "ep") or name in found or not size.isdecimal():
                raise refuse("grid", "each of dp, tp, pp, cp, ep at most once, as in 'dp=2,tp=4'", sizes)
            found[name] = int(size)
        return cls(**found, device=device, timeout=timeout)

    @classmethod
    def alone(cls, device: str = "cpu") -> "Grid":
        """Return a grid of this rank only, without involving other ranks: for a reference model."""
        _check_started()
        grid = cls.__new__(cls)
        rank = dist.get_rank()
        group = dist.new_group([rank], use_local_synchronization=True)
        for name in AXES:
            setattr(grid, name, Axis(name, 1, 0, (rank,), group))
        grid.mesh = DeviceMesh.from_group([group] * 4, device, torch.tensor([[[[rank]]]]), mesh_dim_names=MESH)
        grid.device = torch.device(device)
        return grid

    def abort(self) -> None:
        """Abort all groups of this rank: pending and later operations raise on their ranks."""
        for name in AXES:
            getattr(self, name).group.abort()

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Abort the peers if this rank fails inside the block, so that none waits for a message that never arrives."""
        return on_error(self.abort)

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise on all ranks if one fails inside the block: there its error, elsewhere one of ringcomm with its `rank`.

        Inside the block, a rank may only wait for ranks that fail alike.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = [""] * self.world.size
        if self.world.size > 1:
            sent = encode_error(failure_on(self.world.rank, failure)) if failure else ""
            dist.all_gather_object(failures, sent, group=self.world.group)
        if failure:
            raise failure
        raise_first_failure(failures, self.world.rank, None)

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
        more = "".join(f", {axis.name}={axis.size}" for axis in (self.cp, self.ep) if axis.size > 1)
        return f"Grid(dp={self.dp.size}, tp={self.tp.size}, pp={self.pp.size}{more})"


@contextmanager
def on_error(abort: Callable[[], None]) -> Iterator[None]:
    """Abort if the block raises."""
    try:
        yield
    except BaseException:
        abort()
        raise


def _check_started() -> None:
    if not dist.is_initialized():
        raise ArgumentError("no default process group: call torch.distributed.init_process_group before Grid")


def _lines(ranks: torch.Tensor, *dims: int) -> list[list[int]]:
    """Return the lists of ranks that differ along these dimensions only."""
    others = [dim for dim in range(ranks.dim()) if dim not in dims]
    size = prod(ranks.shape[dim] for dim in dims)
    lines: list[list[int]] = ranks.permute(*others, *dims).reshape(-1, size).tolist()
    return lines


def _axis(name: str, lines: list[list[int]], *, timeout: timedelta | None, alone: dict[int, dist.ProcessGroup]) -> Axis:
    """Create a process group for each line of ranks, and return this rank's.

    A rank that is alone on several axes has one group for them, kept in `alone`: it carries no messages.
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
