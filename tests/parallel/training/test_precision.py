"""Mixed precision: masters, the loss scale, and skipped steps."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases.small_gpt import MICRO_BATCHES, batch_of, config_for, mine
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, Pipeline, gpt_loss, gpt_stages, gpt_tied_weights
from ringcomm.parallel.model.verify import full_values
from ringcomm.pipelining.schedule import make_schedule


def sgd(masters):
    return torch.optim.SGD(masters, lr=0.5, momentum=0.9)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@torch_world.on(1)
def test_one_process_trains_as_in_the_paper_bit_for_bit(dtype):
    """Compare with the training loop of the paper."""
    model, reference = network(), network()
    precision = MixedPrecision([model], Grid(), sgd, dtype, init_scale=1024.0)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in reference.parameters()]
    optimizer, scale = sgd(masters), 1024.0 if dtype == torch.float16 else 1.0
    reference.to(dtype)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    losses = []
    for _ in range(10):
        loss = model(x).square().mean()
        losses.append(float(loss))
        (loss * precision.loss_scale).backward()
        assert precision.step() > 0
        precision.zero_grad()

        reference.zero_grad()
        (reference(x).square().mean() * scale).backward()
        for parameter, master in zip(reference.parameters(), masters, strict=True):
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        for parameter, master in zip(reference.parameters(), masters, strict=True):
            parameter.data.copy_(master)
        for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, expected)
    assert losses[-1] < losses[0]
    for got, expected in zip(precision.masters, masters, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)
        assert torch.equal(got, got.to(dtype).float()) is (dtype == torch.float32)  # 16 bits would have lost some


@pytest.mark.parametrize(
    ("layout", "dtype", "bad_rank", "bad", "where"),
    [
        ((2, 2, 1), torch.float16, 3, math.nan, "blocks.0.mlp.up.bias"),  # sharded
        ((1, 2, 2), torch.float16, 3, math.nan, "embedding.weight"),  # tied
        ((2, 1, 2), torch.float16, 2, math.inf, "norm.weight"),  # replicated
        ((1, 4, 1), torch.bfloat16, 1, math.nan, "norm.weight"),  # on a rank that does not count it
    ],
    ids=str,
)
@torch_world.on(4)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(layout, dtype, bad_rank, bad, where):
    dp, tp, pp = layout
    grid = Grid(dp, tp, pp)
    config = config_for(tp, pp)
    chunks = gpt_stages(config, grid)
    precision = MixedPrecision(chunks, grid, sgd, dtype, init_scale=1024.0, growth_interval=2)
    replicas, tied = DataParallel(chunks, grid.dp), gpt_tied_weights(chunks, grid)
    schedule = make_schedule("1f1b", pp, MICRO_BATCHES)
    pipeline = Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=replicas, tied=tied)
    answers, scales = [], []
    for step in range(4):
        inputs, targets = (mine(each, grid.dp) for each in batch_of(config, grid, step))
        pipeline.step(inputs, targets, precision.loss_scale)
        if step == 1 and dist.get_rank() == bad_rank:
            dict(chunks[0].named_parameters())[where].grad.view(-1)[-1] = bad
        before = full_values("weight", chunks, grid)
        answers.append(precision.step(max_norm=1.0) is not None)
        after = full_values("weight", chunks, grid)
        assert any(not torch.equal(x, after[name]) for name, x in before.items()) is answers[-1]
        precision.zero_grad()
        scales.append(precision.loss_scale)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [x.tolist() for x in full_values("weight", chunks, grid).values()])
    assert all(each == everywhere[0] for each in everywhere)
    assert answers == [True, False, True, True]
    assert scales == ([1024.0, 512.0, 512.0, 1024.0] if dtype == torch.float16 else [1.0] * 4)


def different_replicas():
    grid = Grid(dp=2)
    torch.manual_seed(grid.dp.rank)
    model = nn.Linear(4, 4)
    precision = MixedPrecision([model], grid, sgd, torch.bfloat16)
    replicas = DataParallel(model, grid.dp)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    replicas.finish_grad_sync()
    precision.step()
    return [x.tolist() for x in (*precision.masters, *model.parameters())]


def test_all_replicas_start_from_the_masters_of_the_first():
    first, second = torch_world.run(different_replicas, 2)
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch_world.on(1)
def test_the_unscaled_gradients_are_clipped(dtype):
    model = network()
    precision = MixedPrecision(
        [model], Grid(), lambda masters: torch.optim.SGD(masters, lr=1.0), dtype, init_scale=256.0
    )
    before = [master.detach().clone() for master in precision.masters]
    (model(torch.ones(4, 6, dtype=dtype)).square().sum() * 10 * precision.loss_scale).backward()
    norm = precision.step(max_norm=0.5)
    moved = torch.stack([(master - old).norm() for master, old in zip(precision.masters, before, strict=True)]).norm()
    assert norm > 1
    assert abs(float(moved) - 0.5) < 1e-3


@torch_world.on(1)
def test_an_infinite_norm_of_finite_gradients_skips_the_step_and_other_dtypes_are_refused():
    model = nn.Linear(1000, 1000)
    precision = MixedPrecision([model], Grid(), sgd, torch.bfloat16)
    before = [master.detach().clone() for master in precision.masters]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e38)
    assert precision.step() is None
    for master, old in zip(precision.masters, before, strict=True):
        assert torch.equal(master, old)
    with pytest.raises(ArgumentError, match=r"expected torch\.float32, torch\.bfloat16 or torch\.float16, got"):
        MixedPrecision([network()], Grid(), sgd, torch.float64)
