"""Data parallelism: buckets, their order, averages, and misuse."""

import time
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import torch_world
from harness.failures import PROMPT, raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import DataParallel, Grid, ShardedOptimizer
from ringcomm.parallel.data.buckets import partition


def network(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))
    model.register_buffer("numbers", torch.randint(100, (4,)))
    return model.double()


def rows(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * size, 6, dtype=torch.float64, generator=generator)


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def same_gradients(model, whole):
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-14)


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
@torch_world.each("bucket_bytes", [1, 3000, 1 << 20])
def test_gradients_equal_those_of_the_whole_batch_for_every_bucket_size(bucket_bytes):
    size = dist.get_world_size()
    dp = Grid(dp=size).dp
    model, whole = network(seed=dp.rank), network(seed=0)
    data_parallel = DataParallel(model, dp, bucket_bytes=bucket_bytes)
    start = whole.state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(x, start[name])  # all start from the first replica
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = rows(step, size)
        whole(x).square().mean().backward()
        model(mine(x)).square().mean().backward()
        data_parallel.finish_grad_sync()
        same_gradients(model, whole)
        for optimizer in optimizers:
            optimizer.step()
    seen = [None] * size
    dist.all_gather_object(seen, [parameter.tolist() for parameter in model.parameters()])
    assert all(each == seen[0] for each in seen)


@torch_world.on(2, 4)
def test_no_sync_accumulates_gradients_until_the_last_backward():
    size = dist.get_world_size()
    model, whole = network(0), network(0)
    data_parallel = DataParallel(model, Grid(dp=size).dp, bucket_bytes=3000)
    for last in (False, True):  # whether the last backward is inside no_sync
        for each in (model, whole):
            each.zero_grad()
        for step in range(3):
            x = rows(step, size)
            whole(x).square().mean().backward()
            if step < 2 or last:
                with data_parallel.no_sync():
                    model(mine(x)).square().mean().backward()
            else:
                model(mine(x)).square().mean().backward()
        data_parallel.finish_grad_sync()
        same_gradients(model, whole)


class Sides(nn.Module):
    """Layers used in either order, of which one may be unused."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x, route):
        x = self.b(self.a(x)) if route == 0 else self.a(self.b(x))
        return self.c(x) if route < 2 else x


@torch_world.on(2)
def test_ranks_may_use_parameters_in_different_orders_or_not_at_all():
    dp, rank = Grid(dp=2).dp, dist.get_rank()
    torch.manual_seed(0)
    model = Sides()
    data_parallel = DataParallel(model, dp, bucket_bytes=1)
    x = torch.ones(2, 4, dtype=torch.float64)
    expected = []
    for routes in ((0, 1), (1, 2), (2, 2)):
        grads = []
        for route in routes:  # the gradients of each rank, computed here
            model.zero_grad()
            with data_parallel.no_sync():
                model(x, route).sum().backward()
            grads.append([torch.zeros(4, 4) if p.grad is None else p.grad.clone() for p in model.parameters()])
        expected = [(one + other) / 2 for one, other in zip(*grads, strict=True)]
        model.zero_grad()
        model(x, routes[rank]).sum().backward()
        data_parallel.finish_grad_sync()
        for parameter, average in zip(model.parameters(), expected, strict=True):
            if parameter is model.c.weight and routes == (2, 2):
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, average, check_dtype=False)


@torch_world.on(2)
def test_full_buckets_are_sent_while_backward_runs():
    model = network(0)
    data_parallel = DataParallel(model, Grid(dp=2).dp, bucket_bytes=1)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(data_parallel._sent))
    model(rows(0, 1)).square().mean().backward()
    data_parallel.finish_grad_sync()
    assert seen[1] == 2  # both of the last layer
    assert seen[-1] == 6


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_backward_continues_while_buckets_wait_for_other_ranks():
    """Run backward on the second rank only after the first has finished its own."""
    model = network(0)
    dp = Grid(dp=2).dp
    data_parallel = DataParallel(model, dp, bucket_bytes=1)
    ready = torch.zeros(())
    if dp.rank == 1:
        dist.recv(ready, 0)
    model(rows(0, 1)).square().mean().backward()
    if dp.rank == 0:
        dist.send(ready, 1)
    data_parallel.finish_grad_sync()


def test_a_bucket_ends_when_full_or_at_another_dtype():
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in [(10, torch.float32)] * 3 + [(10, torch.bfloat16)] * 2]
    names = {id(tensor): place for place, tensor in enumerate(tensors)}
    found = [[names[id(each)] for each in bucket] for bucket in partition(tensors, 80)]
    assert found == [[0, 1], [2], [3, 4]]


@torch_world.on(2)
def test_a_backward_before_synchronization_is_refused_and_a_failed_one_leaves_no_trace():
    """Fail a backward, run it again without synchronization, and train on after `finish_grad_sync`."""
    model, whole = network(0), network(0)
    data_parallel = DataParallel(model, Grid(dp=2).dp, bucket_bytes=1)
    hook = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows(0, 1)).sum().backward()
    hook.remove()
    with pytest.raises(ArgumentError, match="call finish_grad_sync after each backward"):
        model(rows(0, 1)).sum().backward()
    data_parallel.finish_grad_sync()
    model.zero_grad()
    whole(rows(1, 2)).square().mean().backward()
    model(mine(rows(1, 2))).square().mean().backward()
    data_parallel.finish_grad_sync()
    same_gradients(model, whole)


@torch_world.on(2)
def test_a_module_is_wrapped_again_after_the_first_was_closed_or_deleted_which_frees_its_buckets():
    grid, model, whole = Grid(dp=2), network(0), network(0)
    buckets, data_parallel = [], None
    for turn in range(3):
        if turn:
            text = str(raised(ArgumentError, lambda: DataParallel(model[2], grid.dp)))
            assert text == "module: already has a DataParallel or ShardedOptimizer; close it first"
            raised(ArgumentError, lambda: ShardedOptimizer(model, grid, partial(torch.optim.SGD, lr=0.1)))
        if turn == 1:
            data_parallel.close()
        data_parallel = None
        data_parallel = DataParallel(model, grid.dp)
        buckets.append(weakref.ref(data_parallel._buckets[0]))
    whole(rows(0, 2)).square().mean().backward()
    model(mine(rows(0, 2))).square().mean().backward()
    data_parallel.finish_grad_sync()
    same_gradients(model, whole)
    assert sum(bucket() is not None for bucket in buckets) == 1


@torch_world.on(1, 2, 3, backends=torch_world.BACKENDS)
def test_parameters_are_decayed_only_if_a_replica_used_them_as_in_torch():
    """Compare with DistributedDataParallel: one layer used by all replicas, one by the last, one by none."""
    size, rank = dist.get_world_size(), dist.get_rank()
    trained = []
    for wrap in (DataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = Sides()
        mine = DataParallel(model, Grid(dp=size).dp) if wrap is DataParallel else None
        call = model if mine else wrap(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        for route in (2, 2 if rank < size - 1 else 0, 2):
            optimizer.zero_grad()
            call(torch.zeros(2, 4, dtype=torch.float64), route).sum().backward()
            if mine:
                mine.finish_grad_sync()
            trained.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
            optimizer.step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    ours, theirs = trained[:4], trained[4:]
    assert [grads[2] is None for grads in ours[:3]] == [True, False, True]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@torch_world.on(2, 3, backends=torch_world.BACKENDS)
@torch_world.each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_gradient_of_negative_zeros_on_one_replica_is_a_gradient_on_all(dtype):
    model = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in ((3,), (), (0,), (2, 2)))
    data_parallel = DataParallel(model, Grid(dp=dist.get_world_size()).dp)
    used = model[:3] if dist.get_rank() == 1 else model[2:3]
    sum((parameter * -0.0).sum() for parameter in used).backward()
    data_parallel.finish_grad_sync()
    assert [None if each.grad is None else each.grad.tolist() for each in model] == [[0.0] * 3, 0.0, [], None]


@pytest.mark.parametrize("early", [True, False])
@torch_world.on(3)
def test_a_sparse_gradient_of_one_replica_ends_the_step_of_all(early):
    """Let backward refuse it, or `finish_grad_sync`."""
    rank, begun = dist.get_rank(), time.monotonic()
    model = nn.Embedding(10, 4, sparse=rank == 1)
    data_parallel = DataParallel(model, Grid(dp=3).dp)
    dist.barrier()  # the replicas have got their weights, which rank 1 does not wait for

    def step():
        with nullcontext() if early else data_parallel.no_sync():
            model(torch.arange(3)).sum().backward()
        data_parallel.finish_grad_sync()

    text = str(raised(ArgumentError if rank == 1 else Aborted, step))
    assert "gradient of a parameter of shape (10, 4): expected a dense one, got a sparse one" in text
    assert time.monotonic() - begun < PROMPT


@torch_world.on(2)
def test_buckets_of_no_bytes_are_refused():
    grid, model = Grid(dp=2), nn.Linear(4, 4)
    sgd = torch.optim.SGD
    for wrong, least in ((0, " from 1 to "), (-1, " from 1 to "), ("1M", ", got '1M'")):
        for wrapped in (
            lambda **x: DataParallel(model, grid.dp, **x),
            lambda **x: ShardedOptimizer(model, grid, sgd, **x),
        ):
            text = str(raised(ArgumentError, lambda: wrapped(bucket_bytes=wrong)))  # noqa: B023 (called in this turn)
            assert text.startswith(f"bucket_bytes: expected an integer{least}")
    ShardedOptimizer(model, grid, sgd, bucket_bytes=1)  # the groups are usable


@torch_world.on(2)
def test_replicas_that_differ_are_refused_on_all_ranks():
    rank, dp = dist.get_rank(), Grid(dp=2).dp
    frozen, longer, buffered = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    frozen[rank].requires_grad_(False)
    longer.extend([] if rank else [nn.Linear(4, 4)])
    buffered.register_buffer("numbers", torch.zeros(3 + rank))
    texts = [str(raised(ArgumentError, lambda: DataParallel(m, dp))) for m in (frozen, longer, buffered)]  # noqa: B023 (called in this turn)
    assert texts[0] == (
        "tensor 0 of replica 1 (rank 1): expected as on rank 0, 0.0.weight (4, 4) torch.float32 "
        "requires_grad=False, got 0.0.weight (4, 4) torch.float32 requires_grad=True"
    )
    assert texts[1].startswith("tensor 4 of replica 1 (rank 1): expected as on rank 0, 0.2.weight (4, 4)")
    assert texts[1].endswith("got none")
    assert texts[2].endswith("the buffer 0.numbers (3,) torch.float32, got the buffer 0.numbers (4,) torch.float32")
