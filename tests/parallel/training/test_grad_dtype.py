"""Gradients of 16-bit models accumulated in float32, over many micro-batches."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases.pipelines import MICRO_BATCHES, ROWS, batch, layers
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, Pipeline, make_schedule

COUNT = 256  # micro-batches


def accumulated(dtype):
    """Return the largest error of the gradients, relative to the largest gradient, and their dtype."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    data_parallel = DataParallel(model, Grid(dp=size).dp, grad_dtype=dtype)
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    for number in range(COUNT):
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(size * 2, 16, generator=draw).bfloat16()
        for replica, rows in enumerate(x.chunk(size)):
            grads = torch.autograd.grad((model(rows) + 1).square().mean(), list(model.parameters()))
            exact = [total + grad.double() / size for total, grad in zip(exact, grads, strict=True)]
            if replica == rank and number < COUNT - 1:
                with data_parallel.no_sync():
                    (model(rows) + 1).square().mean().backward()
            elif replica == rank:
                (model(rows) + 1).square().mean().backward()
    data_parallel.finish_grad_sync()
    (found,) = {parameter.grad.dtype for parameter in model.parameters()}
    pairs = zip(model.parameters(), exact, strict=True)
    return max(float((each.grad - true).abs().max() / true.abs().max()) for each, true in pairs), found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_float32_gradients_of_many_micro_batches_keep_what_bfloat16_loses(size, backend):
    for error, dtype in torch_world.run(accumulated, size, torch.float32, backend=backend):
        assert dtype == torch.float32
        assert error < 1e-5
    for error, dtype in torch_world.run(accumulated, size, None, backend=backend):
        assert dtype == torch.bfloat16
        assert error > 5e-3


@torch_world.on(2)
def test_a_pipeline_in_bfloat16_trains_with_float32_gradients():
    grid = Grid(pp=2)
    stage = layers(2)[grid.pp.rank]
    training = MixedPrecision(stage, grid, partial(torch.optim.SGD, lr=0.1), torch.bfloat16)
    schedule = make_schedule("1f1b", 2, MICRO_BATCHES)
    replicas = DataParallel(stage, grid.dp, grad_dtype=torch.float32)
    pipe = Pipeline(grid, stage, schedule, nn.functional.mse_loss, data_parallel=replicas)
    for _ in range(2):
        pipe.step(*batch(MICRO_BATCHES * ROWS, dtype=torch.bfloat16))
        assert {each.grad.dtype for each in stage.parameters()} == {torch.float32}
        assert not all(torch.equal(each.grad, each.grad.bfloat16().float()) for each in stage.parameters())
        assert training.step(max_norm=1.0) > 0
        training.zero_grad()


@torch_world.on(2)
def test_a_gradient_that_is_there_is_converted_and_the_dtype_may_change_again():
    model = nn.Linear(2, 2).bfloat16()
    dp = Grid(dp=2).dp
    model(torch.ones(2).bfloat16()).sum().backward()
    for dtype in (torch.float32, torch.bfloat16):
        data_parallel = DataParallel(model, dp, grad_dtype=dtype)
        assert model.weight.grad.dtype == dtype
        model(torch.ones(2).bfloat16()).sum().backward()
        data_parallel.finish_grad_sync()
        assert model.weight.grad.dtype == dtype
        del data_parallel
    assert model.weight.grad.tolist() == [[3.0] * 2] * 2
    with pytest.raises(ArgumentError, match=r"grad_dtype: expected a floating-point dtype, got torch\.int32"):
        DataParallel(model, dp, grad_dtype=torch.int32)
