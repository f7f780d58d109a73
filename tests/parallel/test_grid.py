"""The grid: the ranks of each axis, and refused sizes."""

import gc
import os

import pytest
import torch
import torch.distributed as dist

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid


def lines(dp, tp, pp):
    grid = Grid(dp, tp, pp)
    axes = {name: getattr(grid, name) for name in ("dp", "tp", "pp", "model", "world", "ends")}
    for axis in axes.values():
        assert axis.ranks[axis.rank] == dist.get_rank()
        assert dist.get_process_group_ranks(axis.group) == [*axis.ranks]
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=axis.group)
        assert x.item() == sum(axis.ranks)
    for name in ("dp", "tp", "pp"):
        assert grid.mesh[name].get_group() is axes[name].group
        assert grid.mesh.get_local_rank(name) == axes[name].rank
    return {name: axis.ranks for name, axis in axes.items()}


@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_shards_of_a_layer_are_neighbors_and_stages_are_farthest_apart(backend):
    found, world = torch_world.run(lines, 8, 2, 2, 2, backend=backend), (*range(8),)
    assert found[0] == {"tp": (0, 1), "dp": (0, 2), "pp": (0, 4), "model": (0, 1, 4, 5), "world": world, "ends": (0, 4)}
    assert found[7] == {"tp": (6, 7), "dp": (5, 7), "pp": (3, 7), "model": (2, 3, 6, 7), "world": world, "ends": (3, 7)}


def test_a_stage_between_the_ends_and_a_grid_of_one_rank_have_axes_of_one_rank():
    assert [each["ends"] for each in torch_world.run(lines, 4, 1, 1, 4)] == [(0, 3), (1,), (2,), (0, 3)]
    assert torch_world.run(lines, 1, 1, 1, 1)[0] == dict.fromkeys(("dp", "tp", "pp", "model", "world", "ends"), (0,))


@torch_world.on(2)
def test_a_rank_makes_a_grid_of_its_own():
    if dist.get_rank() == 1:  # no other rank takes part
        grid = Grid.alone()
        assert {getattr(grid, name).ranks for name in ("dp", "tp", "pp", "model", "world", "ends")} == {(1,)}
        x = torch.tensor([3.0])
        dist.all_reduce(x, group=grid.world.group)
        assert x.item() == 3.0
        assert grid.mesh.shape == (1, 1, 1)


def refused():
    with pytest.raises(ArgumentError, match=r"size of the grid: expected .* 2, got dp 1 · tp 3 · pp 2 = 6"):
        Grid(tp=3, pp=2)
    with pytest.raises(ArgumentError, match="tp: expected an integer from 1"):
        Grid(dp=2, tp=0)
    with pytest.raises(ArgumentError, match="heads: expected a multiple of tp = 2, got 7"):
        Grid(tp=2).tp.divide("heads", 7)
    return Grid(tp=2).tp.divide("heads", 6)


def test_sizes_that_do_not_divide_are_refused():
    assert torch_world.run(refused, 2) == [3, 3]


def test_a_grid_needs_a_default_process_group():
    for make in (Grid, Grid.alone):
        with pytest.raises(ArgumentError, match="init_process_group"):
            make()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def closed():
    """Return how many descriptors this process has before a grid, with it, and after it is closed, three times."""
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
    return counts


@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_a_closed_grid_leaves_no_descriptors(backend):
    for counts in torch_world.run(closed, 4, backend=backend):
        assert all(after <= counts[0] for after in counts[2::2]), counts
