"""The all_reduce of sparse tensors."""

import pytest
import torch
import torch.distributed as dist
from test_clients import flat, same_as_on_gloo, train
from test_operations import me, same, value, values
from torch import nn

from harness import torch_world
from ringcomm import ArgumentError, MismatchError


def sparse(rank, dtype=torch.float32, dense=()):
    """A tensor with 7 rows, of which each rank has some, one of them twice."""
    rows = [rank, rank, 3, (rank + 5) % 7]
    return torch.sparse_coo_tensor([rows], value(rank, len(rows), *dense, dtype=dtype), (7, *dense))


def dense_sum(size, dtype, dense):
    total = sum(sparse(rank, torch.float32, dense).to_dense() for rank in range(size))
    return total.to(dtype)


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
def test_sparse_tensors_are_added():
    rank, size = me()
    for dtype in (torch.float32, torch.float64, torch.int64):
        for dense in ((), (3,)):
            x = sparse(rank, dtype, dense)
            dist.all_reduce(x)
            assert x.is_sparse
            same(x.to_dense(), dense_sum(size, dtype, dense))
    work = dist.all_reduce(x := sparse(rank), async_op=True)
    work.wait()
    (result,) = work.result()
    same(result.to_dense(), dense_sum(size, torch.float32, ()))
    x = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), [], (4,))
    dist.all_reduce(x)
    assert x._nnz() == 0


@torch_world.on(2)
def test_sparse_tensors_that_gloo_does_not_take():
    rank, size = me()
    for dtype in (torch.float16, torch.bfloat16):
        dist.all_reduce(x := sparse(rank, dtype))
        same(x.to_dense(), dense_sum(size, dtype, ()))
    dist.all_reduce(x := sparse(rank), dist.ReduceOp.AVG)
    same(x.to_dense(), dense_sum(size, torch.float32, ()) / size)
    (x,) = dist.all_reduce(sparse(rank), async_op=True).get_future().wait()
    same(x.to_dense(), dense_sum(size, torch.float32, ()))


@torch_world.on(2)
def test_sparse_tensors_that_do_not_fit_are_refused_and_the_group_stays_usable():
    rank, _ = me()
    with pytest.raises(ArgumentError, match=r"(?s)sum or avg for sparse tensors, got max.*in the torch\.distributed"):
        dist.all_reduce(sparse(rank), dist.ReduceOp.MAX)
    with pytest.raises(MismatchError, match=r"(?s)rank 0 passed .*shape \(5,\).*and rank 1 .*shape \(6,\)"):
        dist.all_reduce(torch.sparse_coo_tensor([[1]], [1.0], (5 + rank,)))
    dist.all_reduce(x := value(rank, 3))
    same(x, sum(values(3)))


@same_as_on_gloo
def test_ddp_with_a_sparse_embedding():
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs = [(torch.arange(6) * (step + 2) + rank) % 20 for step in range(3)]
    return train(net, None, inputs, optimizer=optimizer), flat(net.parameters())
