"""Subclasses of torch.Tensor, and tensors that have a shape and no memory."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from test_operations import me, same, value, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import torch_world
from ringcomm import ArgumentError


class Plain(torch.Tensor):
    pass


@torch_world.on(2, 4, backends=torch_world.BACKENDS)
def test_the_result_of_a_functional_collective_is_waited_for():
    rank, size = me()
    pending = lambda: functional.all_reduce(value(rank, 5), "sum", dist.group.WORLD)  # noqa: E731
    total = sum(values(5))
    x = pending()
    assert type(x).__name__ == "AsyncCollectiveTensor"
    dist.all_reduce(x)  # reads and writes it
    same(x.trigger_wait(), size * total)
    outputs = [torch.empty(5) for _ in range(size)]
    dist.all_gather(outputs, pending())
    dist.all_gather_into_tensor(out := torch.empty(5 * size), pending())
    for got in (*outputs, *out.chunk(size)):
        same(got, total)
    share = torch.empty(5)
    dist.reduce_scatter(share, [pending() for _ in range(size)])
    same(share, size * total)
    peer = rank ^ 1
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, pending(), peer), dist.P2POp(dist.irecv, out := torch.empty(5), peer)]
    ):
        work.wait()
    same(out, total)


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_subclasses_with_memory_of_their_own_are_used_in_place():
    rank, _ = me()
    x = value(rank, 3).as_subclass(Plain)
    dist.all_reduce(x)
    assert type(x) is Plain
    same(x.as_subclass(torch.Tensor), sum(values(3)))
    x = value(rank, 3, 4).t().as_subclass(Plain)
    dist.all_reduce(x)
    same(x.as_subclass(torch.Tensor).contiguous(), sum(values(3, 4)).t().contiguous())


@torch_world.on(2)
def test_a_subclass_that_wraps_tensors_is_refused_by_name():
    rank, size = me()
    mesh = init_device_mesh("cpu", (size,))
    cases = {
        r"x\.to_local\(\).*DTensor": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]),
        r"the tensors that it wraps \(\.a, \.b\).*TwoTensor": TwoTensor(torch.ones(3), torch.ones(3)),
    }
    for words, x in cases.items():
        with pytest.raises(ArgumentError, match=f"(?s)memory of its own.*{words}.*in the torch.distributed group"):
            dist.all_reduce(x)
    dist.all_reduce(x := value(rank, 3))
    same(x, sum(values(3)))


def every_call(empty, rank, size):
    """Make every kind of call with tensors that `empty` makes, on this rank alone."""
    x = empty(size)
    all_ranks = lambda: [empty(size) for _ in range(size)]  # noqa: E731
    at_root = lambda: all_ranks() if rank == 0 else None  # noqa: E731
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.reduce(x, 0)
    dist.broadcast(x, 0)
    dist.all_gather(all_ranks(), x)
    dist.all_gather_into_tensor(empty(size * size), x)
    dist.gather(x, at_root(), 0)
    dist.scatter(x, at_root(), 0)
    dist.reduce_scatter(x, all_ranks())
    dist.reduce_scatter_tensor(x, empty(size * size))
    dist.all_to_all(all_ranks(), all_ranks())
    dist.all_to_all_single(empty(size), x)
    dist.send(x, (rank + 1) % size)
    dist.recv(x, (rank + 1) % size)


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_calls_move_nothing_for_tensors_without_memory():
    rank, size = me()
    every_call(lambda n: torch.empty(n, device="meta"), rank, size)
    with FakeTensorMode() as mode:
        every_call(torch.empty, rank, size)
        if rank == 0:  # the other ranks are not called
            every_call(torch.empty, rank, size)
            dist.barrier()
    fake = mode.from_tensor(torch.empty(3))
    dist.all_reduce(fake)
    assert fake.shape == (3,)
    dist.all_reduce(x := value(rank, 3))  # the ranks are still in step
    same(x, sum(values(3)))


@torch_world.on(2)
def test_a_sparse_sum_moves_nothing_without_memory():
    rank, _ = me()
    if rank == 0:
        for device, mode in (("meta", nullcontext()), ("cpu", FakeTensorMode())):
            with mode:
                indices = torch.zeros((1, 2), dtype=torch.int64, device=device)
                dist.all_reduce(torch.sparse_coo_tensor(indices, torch.empty(2, device=device), (4,)))
    dist.barrier()
