"""The grid: the ranks of each axis, and refused sizes."""

import gc
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, RingcommError
from ringcomm.parallel import Grid, TensorGrid

AXES = ("dp", "cp", "tp", "pp", "dp_cp", "ep", "edp", "model", "world", "ends")


def lines(sizes):
    grid = Grid.parse(sizes)
    axes = {name: getattr(grid, name) for name in AXES}
    for axis in axes.values():
        assert axis.ranks[axis.rank] == dist.get_rank()
        assert dist.get_process_group_ranks(axis.group) == [*axis.ranks]
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=axis.group)
        assert x.item() == sum(axis.ranks)
    for name in ("dp", "cp", "tp", "pp"):
        assert grid.mesh[name].get_group() is axes[name].group
        assert grid.mesh.get_local_rank(name) == axes[name].rank
    return {name: axis.ranks for name, axis in axes.items()}


@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_shards_of_a_layer_are_neighbors_and_stages_are_farthest_apart(backend):
    found, shared = torch_world.run(lines, 8, "dp=2,tp=2,pp=2", backend=backend), {"world": (*range(8),)}
    shared |= {"dp": (0, 2), "dp_cp": (0, 2), "edp": (0, 2), "cp": (0,), "ep": (0,)}
    assert found[0] == {"tp": (0, 1), "pp": (0, 4), "model": (0, 1, 4, 5), "ends": (0, 4), **shared}
    shared |= {"dp": (5, 7), "dp_cp": (5, 7), "edp": (5, 7), "cp": (7,), "ep": (7,)}
    assert found[7] == {"tp": (6, 7), "pp": (3, 7), "model": (2, 3, 6, 7), "ends": (3, 7), **shared}


def test_parts_of_a_sequence_are_nearer_than_replicas_and_neighboring_replicas_share_experts():
    found = torch_world.run(lines, 8, "cp=2, dp=4, ep=2")
    shared = {"tp": (5,), "pp": (5,), "model": (5,), "ends": (5,), "world": (*range(8),), "dp_cp": (*range(8),)}
    assert found[5] == {"cp": (4, 5), "dp": (1, 3, 5, 7), "ep": (5, 7), "edp": (0, 1, 4, 5), **shared}


def test_a_stage_between_the_ends_and_a_grid_of_one_rank_have_axes_of_one_rank():
    assert [each["ends"] for each in torch_world.run(lines, 4, "pp=4")] == [(0, 3), (1,), (2,), (0, 3)]
    assert torch_world.run(lines, 1, "dp=1")[0] == dict.fromkeys(AXES, (0,))


@torch_world.on(2)
def test_a_rank_makes_a_grid_of_its_own():
    if dist.get_rank() == 1:  # no other rank takes part
        grid = Grid.alone()
        assert {getattr(grid, name).ranks for name in AXES} == {(1,)}
        x = torch.tensor([3.0])
        dist.all_reduce(x, group=grid.world.group)
        assert x.item() == 3.0
        assert grid.mesh.shape == (1, 1, 1, 1)


@torch_world.on(2)
def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ArgumentError, match=r"size of the grid: expected .* 2, got pp 2 · dp 1 · cp 1 · tp 3 = 6"):
        Grid(tp=3, pp=2)
    with pytest.raises(ArgumentError, match="tp: expected an integer from 1"):
        Grid(dp=2, tp=0)
    with pytest.raises(ArgumentError, match=r"ep: expected a divisor of dp = 2 \(nearest: 2\), got 4"):
        Grid(dp=2, ep=4)
    for text in ("dp=2,dp=1", "dp", "dp=-2", "world=2", ""):
        with pytest.raises(ArgumentError, match=r"grid: expected each of .* at most once, as in 'dp=2,tp=4'"):
            Grid.parse(text)
    with pytest.raises(ArgumentError, match="heads: expected a multiple of tp = 2, got 7"):
        Grid(tp=2).tp.divide("heads", 7)
    assert Grid(tp=2).tp.divide("heads", 6) == 3


def test_a_grid_needs_a_default_process_group():
    for make in (Grid, Grid.alone):
        with pytest.raises(ArgumentError, match="init_process_group"):
            make()


def open_files():
    return len(os.listdir("/proc/self/fd"))


@torch_world.on(4, backends=torch_world.BACKENDS)
def test_a_closed_grid_leaves_no_descriptors():
    dist.all_reduce(torch.zeros(1))
    counts = [open_files()]
    for _ in range(3):
        with Grid(dp=2, pp=2) as grid:
            groups = [axis.group for axis in (grid.dp, grid.tp, grid.pp, grid.model, grid.world, grid.ends)]
            for group in groups:
                dist.all_reduce(torch.zeros(100_000), group=group)
            counts.append(open_files())
        grid.close()  # again
        for group in groups if dist.get_backend() == "ringcomm" else ():  # Gloo keeps a group that is referred to
            with pytest.raises(ValueError, match=r"closed|not initialized"):
                dist.all_reduce(torch.zeros(1), group=group)
        del grid, group, groups
        gc.collect()
        counts.append(open_files())
    with Grid.alone() as alone:
        dist.all_reduce(torch.zeros(1), group=alone.world.group)
    dist.all_reduce(torch.zeros(1))  # the default group still works
    assert all(after <= counts[0] for after in counts[2::2]), counts


@torch_world.on(3)
def test_an_error_of_one_rank_is_raised_on_all_as_an_error_of_its_kind():
    grid, rank = Grid(dp=3), dist.get_rank()

    def fails(error):
        with grid.raise_on_all():
            if rank == 1:
                raise error

    for error, relayed, text in (
        (ArgumentError("a wrong size"), ArgumentError, "a wrong size"),
        (RingcommError("a full disk"), RingcommError, "a full disk"),
        (OSError("a full disk"), RingcommError, "OSError: a full disk"),
    ):
        found = raised(Exception, lambda error=error: fails(error))
        assert type(found) is (type(error) if rank == 1 else relayed)
        assert rank == 1 or (str(found), found.rank) == (f"rank 1: {text}", 1)


@torch_world.on(4, backends=torch_world.BACKENDS)
def test_groups_have_the_timeout_of_init_process_group_or_their_own():
    (begun,) = {backend_options(dist.group.WORLD)._timeout}
    for timeout, expected in ((None, begun), (timedelta(seconds=7), timedelta(seconds=7))):
        grid = Grid(tp=4, timeout=timeout)
        cube = TensorGrid(grid.tp)
        axes = [*(getattr(grid, name) for name in AXES), cube.row, cube.column]
        assert {backend_options(axis.group)._timeout for axis in axes} == {expected}
        assert expected != dist.constants.default_pg_timeout


def backend_options(group):
    return group._get_backend(torch.device("cpu")).options
