"""Data parallelism: buckets, their order, averages, and what happens when it is used wrongly."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_world
from failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid
from ringcomm.parallel.data import in_buckets

BACKENDS = pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


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


def trained(bucket_bytes):
    size = dist.get_world_size()
    dp = Grid(dp=size).dp
    model, whole = network(seed=dp.rank), network(seed=0)
    replicas = DataParallel(model, dp, bucket_bytes=bucket_bytes)
    start = whole.state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(x, start[name])  # all start as the first replica
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = rows(step, size)
        whole(x).square().mean().backward()
        model(mine(x)).square().mean().backward()
        replicas.finish()
        same_gradients(model, whole)
        for optimizer in optimizers:
            optimizer.step()
    seen = [None] * size
    dist.all_gather_object(seen, [parameter.tolist() for parameter in model.parameters()])
    assert all(each == seen[0] for each in seen)


@SIZES
@BACKENDS
def test_gradients_are_those_of_the_whole_batch_whatever_the_size_of_a_bucket(size, backend):
    for bucket_bytes in (1, 3000, 1 << 20):
        torch_world.run(trained, size, bucket_bytes, backend=backend)


def accumulated():
    size = dist.get_world_size()
    model, whole = network(0), network(0)
    replicas = DataParallel(model, Grid(dp=size).dp, bucket_bytes=3000)
    for last in (False, True):  # the last backward may or may not be inside
        for each in (model, whole):
            each.zero_grad()
        for step in range(3):
            x = rows(step, size)
            whole(x).square().mean().backward()
            if step < 2 or last:
                with replicas.no_sync():
                    model(mine(x)).square().mean().backward()
            else:
                model(mine(x)).square().mean().backward()
        replicas.finish()
        same_gradients(model, whole)


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_add_up_without_being_sent_until_the_last_backward(size):
    torch_world.run(accumulated, size)


class Sides(nn.Module):
    """Two layers that are used in the one order or the other, or of which one is not used at all."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x, way):
        x = self.b(self.a(x)) if way == 0 else self.a(self.b(x))
        return self.c(x) if way < 2 else x


def crossed():
    dp, rank = Grid(dp=2).dp, dist.get_rank()
    torch.manual_seed(0)
    model = Sides()
    replicas = DataParallel(model, dp, bucket_bytes=1)
    x = torch.ones(2, 4, dtype=torch.float64)
    expected = []
    for ways in ((0, 1), (1, 2), (2, 2)):
        grads = []
        for way in ways:  # what each rank has, on this one
            model.zero_grad()
            with replicas.no_sync():
                model(x, way).sum().backward()
            grads.append([torch.zeros(4, 4) if p.grad is None else p.grad.clone() for p in model.parameters()])
        expected = [(one + other) / 2 for one, other in zip(*grads, strict=True)]
        model.zero_grad()
        model(x, ways[rank]).sum().backward()
        replicas.finish()
        for parameter, average in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, average, check_dtype=False)
    assert not expected[2].any()


def test_ranks_may_use_parameters_in_another_order_or_not_at_all():
    torch_world.run(crossed, 2)


def sent_early():
    """Return for each parameter, as its gradient comes, how many buckets have been sent by then."""
    model = network(0)
    replicas = DataParallel(model, Grid(dp=2).dp, bucket_bytes=1)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(replicas._sent))
    model(rows(0, 1)).square().mean().backward()
    replicas.finish()
    return seen


def test_a_bucket_is_sent_while_backward_still_runs():
    for seen in torch_world.run(sent_early, 2):
        assert seen[1] == 2  # of the last layer both, whichever came first
        assert seen[-1] == 6


def backward_before_the_other():
    """Run backward on the second rank only when the first has come to the end of its own."""
    model = network(0)
    dp = Grid(dp=2).dp
    replicas = DataParallel(model, dp, bucket_bytes=1)
    ready = torch.zeros(())
    if dp.rank == 1:
        dist.recv(ready, 0)
    model(rows(0, 1)).square().mean().backward()
    if dp.rank == 0:
        dist.send(ready, 1)
    replicas.finish()


@BACKENDS
def test_backward_goes_on_while_buckets_wait_for_the_other_ranks(backend):
    torch_world.run(backward_before_the_other, 2, backend=backend)


def test_a_bucket_ends_when_it_is_full_or_the_dtype_changes():
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in [(10, torch.float32)] * 3 + [(10, torch.bfloat16)] * 2]
    names = {id(tensor): place for place, tensor in enumerate(tensors)}
    found = [[names[id(each)] for each in bucket] for bucket in in_buckets(tensors, 80)]
    assert found == [[0, 1], [2], [3, 4]]


def misused():
    model = network(0)
    replicas = DataParallel(model, Grid(dp=2).dp)
    model(rows(0, 1)).sum().backward()
    with pytest.raises(ArgumentError, match="call finish after each backward"):
        model(rows(0, 1)).sum().backward()
    replicas.finish()


def test_a_second_backward_before_the_gradients_are_there_is_refused():
    torch_world.run(misused, 2)


def interrupted():
    """Let a backward fail on all ranks, and go on after `finish`."""
    model, whole = network(0), network(0)
    replicas = DataParallel(model, Grid(dp=2).dp, bucket_bytes=1)
    hook = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows(0, 1)).sum().backward()
    replicas.finish()
    hook.remove()
    model.zero_grad()
    whole(rows(1, 2)).square().mean().backward()
    model(mine(rows(1, 2))).square().mean().backward()
    replicas.finish()
    same_gradients(model, whole)


def test_a_backward_that_failed_is_finished_and_forgotten():
    torch_world.run(interrupted, 2)


def anew():
    model, whole = network(0), network(0)
    dp = Grid(dp=2).dp
    replicas = DataParallel(model, dp)
    replicas = DataParallel(model, dp)
    whole(rows(0, 2)).square().mean().backward()
    model(mine(rows(0, 2))).square().mean().backward()
    replicas.finish()
    same_gradients(model, whole)


def test_of_one_that_is_made_anew_the_old_one_does_nothing():
    torch_world.run(anew, 2)


def leaks():
    """Return how many buckets live after a DataParallel was made anew twice."""
    grid, model = Grid(dp=2), network(0)
    buckets = []
    for _ in range(3):
        replicas = DataParallel(model, grid.dp)
        buckets.append(weakref.ref(replicas._buckets[0]))
    return sum(bucket() is not None for bucket in buckets)


def test_buckets_go_with_their_dataparallel():
    assert torch_world.run(leaks, 2) == [1, 1]


def unused():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    replicas = DataParallel(model, Grid(dp=dist.get_world_size()).dp)
    model[0](torch.ones(2)).sum().backward()
    replicas.finish()
    return [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_parameter_without_a_part_in_the_loss_has_a_gradient_of_zeros(dp):
    assert torch_world.run(unused, dp) == [[[[1.0, 1.0]] * 2, [1.0] * 2, [[0.0] * 2] * 2, [0.0] * 2]] * dp


def other_buffers():
    model = nn.Linear(2, 2)
    model.register_buffer("numbers", torch.zeros(3 + dist.get_rank()))
    return str(raised(ArgumentError, lambda: DataParallel(model, Grid(dp=2).dp)))


def test_replicas_with_other_buffers_are_refused_on_all_ranks():
    for text in torch_world.run(other_buffers, 2):
        assert text == (
            "tensor 2 of replica 1 (rank 1): expected as on rank 0, the buffer 0.numbers (3,) torch.float32, "
            "got the buffer 0.numbers (4,) torch.float32"
        )


def sparse():
    model = nn.Embedding(10, 4, sparse=True)
    replicas = DataParallel(model, Grid(dp=2).dp)
    with pytest.raises(ArgumentError, match=r"the gradient of a parameter of shape \(10, 4\): expected a dense one"):
        model(torch.arange(3)).sum().backward()
    model.zero_grad()
    replicas.finish()


def test_sparse_gradients_are_refused():
    torch_world.run(sparse, 2)


def unlike(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *([] if frozen or dist.get_rank() else [nn.Linear(4, 4)]))
    model[dist.get_rank()].requires_grad_(not frozen)
    with pytest.raises(ArgumentError) as error:
        DataParallel(model, Grid(dp=2).dp)
    return str(error.value)


def test_replicas_that_differ_are_refused_on_all_ranks():
    for text in torch_world.run(unlike, 2, True):
        assert text == (
            "tensor 0 of replica 1 (rank 1): expected as on rank 0, 0.0.weight (4, 4) torch.float32 "
            "requires_grad=False, got 0.0.weight (4, 4) torch.float32 requires_grad=True"
        )
    for text in torch_world.run(unlike, 2, False):
        assert text.startswith("tensor 4 of replica 1 (rank 1): expected as on rank 0, 0.2.weight (4, 4)")
        assert text.endswith("got none")
