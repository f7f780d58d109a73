"""Subclasses of torch.Tensor, and tensors that have a shape and no memory."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from test_operations import me, same, value, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from harness import torch_world
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


@torch_world.called_directly
@torch_world.on(2)
def test_a_sharded_tensor_is_refused_by_name():
    rank, size = me()
    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    words = r"memory of its own.*x\.to_local\(\).*DTensor"
    with pytest.raises(ArgumentError, match=f"(?s){words}.*in the torch.distributed group"):
        dist.all_reduce(x)
    dist.all_reduce(x := value(rank, 3))
    same(x, sum(values(3)))


class Wrapped(torch.Tensor):
    """Has the operations of a tensor that it wraps, in the least that torch demands of such a class."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(cls, lambda x: x.inner, args), **(kwargs or {}))


def both(*shape):
    """Return a tensor that wraps two: `value` of this rank, and ten times as much."""
    x = value(me()[0], *shape)
    return TwoTensor(x, 10 * x)


def same_both(got, expected):
    same(got.a, expected)
    same(got.b, 10 * expected)


@torch_world.on(2)
def test_calls_reach_the_tensors_that_a_subclass_wraps():
    rank, size = me()
    total, gathered = sum(values(4)), torch.cat(values(4))
    dist.all_reduce(x := Wrapped(value(rank, 4)))
    same(x.inner, total)
    dist.all_reduce(x := both(4))
    same_both(x, total)
    dist.all_reduce(x := both(4), async_op=True).wait()
    same_both(x, total)
    dist.broadcast(x := both(4), 1)
    same_both(x, value(1, 4))
    dist.scatter(x := both(2), [both(2), TwoTensor(torch.ones(2), 10 * torch.ones(2))] if rank == 0 else None, 0)
    same_both(x, value(0, 2) if rank == 0 else torch.ones(2))
    work = dist.all_gather(outputs := [both(4) for _ in range(size)], both(4), async_op=True)
    assert len(work.result()) == size  # without the inputs
    for r, out in enumerate(outputs):
        same_both(out, value(r, 4))
    dist.all_gather_into_tensor(out := both(4 * size), both(4))
    same_both(out, gathered)
    dist.reduce_scatter_tensor(out := both(2), both(4))
    same_both(out, total[2 * rank : 2 * rank + 2])
    dist.group.WORLD.allreduce_coalesced([x := both(4), y := both(2)]).wait()
    same_both(x, total)
    same_both(y, sum(values(2)))
    if rank == 0:
        dist.send(both(3), 1)
    else:
        dist.recv(x := both(3))
        same_both(x, value(0, 3))


@torch_world.on(2)
def test_torch_distributes_a_tensor_that_wraps_others():
    rank, size = me()
    mesh = init_device_mesh("cpu", (size,))
    x = value(0, 4)
    same_both(distribute_tensor(both(4), mesh, [Shard(0)]).to_local(), x[2 * rank : 2 * rank + 2])
    same_both(distribute_tensor(both(4), mesh, [Replicate()]).to_local(), x)


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
