"""Shared tensors: made by NumPy or by shared_empty, reduced without staging, also as the buckets of DataParallel."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid
from ringcomm.torch import shared_arrays, shared_empty

LENGTH = 100_000


def last_path():
    return dist.group.WORLD.comm._transport.path()[0]


@torch_world.on(2, 3)
def test_tensors_over_shared_memory_take_the_direct_path():
    size, rank = dist.get_world_size(), dist.get_rank()
    with shared_arrays():
        x = torch.from_numpy(np.full(LENGTH, rank + 1.0))
    for tensor in (x, x[7:], shared_empty(LENGTH), shared_empty((LENGTH // 10, 10), dtype=torch.bfloat16)):
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert last_path() == "symmetric"
        assert (tensor == size).all()
    gathered = shared_empty(size, LENGTH)
    dist.all_gather_into_tensor(gathered, torch.full((LENGTH,), float(rank)))
    assert gathered[:, 0].tolist() == list(range(size))


@torch_world.on(1)
def test_shared_empty_takes_what_torch_empty_takes():
    for shape in (((),), (0,), (3,), (2, 0, 3), (300, 300), ((4, 5),), ([70_000],), (torch.Size([2, 70_000]),)):
        for dtype in (None, torch.bool, torch.float64, torch.complex64, torch.bfloat16):
            made, like = shared_empty(*shape, dtype=dtype), torch.empty(*shape, dtype=dtype)
            assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
            assert made.is_contiguous()
            made.fill_(1)
    for wrong in ((-1,), ("3",), (2.5,)):
        with pytest.raises((RuntimeError, TypeError)):
            shared_empty(*wrong)


@torch_world.on(2, backends=("gloo",))
def test_another_backend_has_no_shared_arrays():
    with pytest.raises(ArgumentError, match="ringcomm"):
        shared_arrays()
    with pytest.raises(ArgumentError, match="ringcomm"):
        shared_empty(3)


@torch_world.on(2)
def test_gradients_are_averaged_where_they_lie():
    model = nn.Linear(200, 200)
    data_parallel = DataParallel(model, Grid(dp=2).dp)
    model(torch.full((1, 200), dist.get_rank() + 1.0)).sum().backward()
    data_parallel.finish_grad_sync()
    assert data_parallel.dp.group.comm._transport.path()[0] == "symmetric"
    torch.testing.assert_close(model.weight.grad, torch.full((200, 200), 1.5))
