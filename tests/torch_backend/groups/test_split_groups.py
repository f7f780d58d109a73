"""dist.split_group. torch has no GPU here: it is told of one, to which the default group is bound."""

from datetime import timedelta
from functools import wraps

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import torch_world
from ringcomm import ArgumentError, CollectiveTimeout, MismatchError
from ringcomm.torch.compat import native

GPU = torch.device("cuda", 0)
SHORT = 0.3  # seconds, where a call must time out


def bound(test):
    """Bind the default group to a GPU during a test."""

    @wraps(test)
    def test_bound():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            patch.setitem(dist.distributed_c10d.Backend.backend_capability, "ringcomm", ["cpu", "cuda"])
            dist.group.WORLD.bound_device_id = GPU
            try:
                test()
            finally:
                dist.group.WORLD.bound_device_id = None

    return test_bound


def sum_of_ranks(group):
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


@torch_world.on(3)
@bound
def test_a_group_is_split_as_nccl_splits_it():
    rank = dist.get_rank()
    group = dist.split_group(split_ranks=[[2, 0], [1]], group_desc="halves")
    order = [2, 0] if native.PYTHON_BACKENDS else [0, 2]  # older torch sorts them
    assert dist.get_process_group_ranks(group) == ([1] if rank == 1 else order)
    assert dist.get_group_rank(group, rank) == group.rank()
    assert sum_of_ranks(group) == (1.0 if rank == 1 else 2.0)
    assert (group.group_desc, group.bound_device_id) == ("halves", GPU)
    assert dist.get_backend(group) == "ringcomm"
    again = dist.split_group(group, [[*range(group.size())]])
    assert sum_of_ranks(again) == sum_of_ranks(group)
    assert dist.get_process_group_ranks(again) == dist.get_process_group_ranks(group)
    for each in (again, group):
        dist.destroy_process_group(each)
    assert sum_of_ranks(None) == 3.0


@torch_world.on(3)
@bound
def test_ranks_in_no_part_get_none_or_from_torch_2_14_on_an_error():
    if dist.get_rank() < 2:
        assert sum_of_ranks(dist.split_group(split_ranks=[[0, 1]])) == 1.0
    elif native.PYTHON_BACKENDS:
        with pytest.raises(ArgumentError, match="this one among them"):
            dist.split_group(split_ranks=[[0, 1]])
    else:
        assert dist.split_group(split_ranks=[[0, 1]]) is None
    other = dist.new_group([1, 2])  # those that are in no split
    if dist.get_rank():
        assert sum_of_ranks(other) == 3.0


@torch_world.on(4)
@bound
def test_a_mesh_of_a_bound_group_is_split():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert sum_of_ranks(mesh.get_group("tp")) == (1.0 if dist.get_rank() < 2 else 5.0)
    assert sum_of_ranks(mesh.get_group("dp")) == (2.0 if dist.get_rank() % 2 == 0 else 4.0)


@torch_world.on(2)
@bound
def test_a_split_group_has_the_timeout_that_it_was_given():
    group = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=SHORT))
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match=f"waited {SHORT} s"):
            dist.all_reduce(torch.ones(1), group=group)
    sum_of_ranks(None)  # rank 1 leaves no earlier; a barrier would be on the GPU


@torch_world.on(2)
@bound
def test_ranks_that_split_differently_learn_of_it():
    parts = [[0], [1]] if dist.get_rank() else [[0, 1]]
    with pytest.raises(MismatchError, match="differently: rank 0 names 2 ranks, 1 name the same"):
        dist.split_group(split_ranks=parts)
    assert sum_of_ranks(None) == 1.0
