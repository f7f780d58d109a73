"""Stages wrapped in torch's `fully_shard` inside a pipeline."""

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.distributed.tensor import DTensor

from cases.pipelines import ROWS, batch, layers, one_by_one
from harness import torch_world
from harness.failures import raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import (
    ColumnParallelLinear,
    DataParallel,
    Experts,
    GPTConfig,
    Grid,
    Pipeline,
    RowParallelLinear,
    clip_grad_norm,
    gpt_loss,
    gpt_stages,
    grad_norm,
)
from ringcomm.pipelining.schedule import make_schedule
from ringcomm.torch.traffic import bytes_sent, record_traffic

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="fully_shard: torch 2.6")
MICRO_BATCHES = 4


def whole_values(module, of):
    values = (of(parameter) for parameter in module.parameters())
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in values]


@torch_world.on(4, backends=torch_world.BACKENDS)
def test_a_pipeline_of_sharded_stages_trains_as_one_process():
    grid = Grid(dp=2, pp=2)
    schedule = make_schedule("1f1b", 2, MICRO_BATCHES)
    stage, whole = layers(2)[grid.pp.rank], nn.Sequential(*layers(2))
    fsdp.fully_shard(stage, mesh=grid.mesh["dp"])
    pipe = Pipeline(grid, stage, schedule, F.mse_loss)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (stage, whole)]
    for step in range(3):
        inputs, targets = batch(2 * MICRO_BATCHES * ROWS, step)
        loss = pipe.step(inputs.chunk(2)[grid.dp.rank], targets.chunk(2)[grid.dp.rank])
        expected = one_by_one(whole, inputs, targets, 2 * MICRO_BATCHES)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        true = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert math.isclose(clip_grad_norm(stage, grid, 0.1), true, rel_tol=1e-12)
        for found, one in zip(
            whole_values(stage, lambda each: each.grad),
            whole_values(whole[grid.pp.rank], lambda each: each.grad),
            strict=True,
        ):
            torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    evaluated = pipe.evaluate(inputs.chunk(2)[grid.dp.rank], targets.chunk(2)[grid.dp.rank])
    torch.testing.assert_close(evaluated, F.mse_loss(whole(inputs), targets), rtol=1e-12, atol=1e-12)


@torch_world.on(4)
def test_each_element_counts_once_in_the_norm_of_parameters_sharded_over_tp_and_dp():
    grid = Grid(dp=2, tp=2)
    torch.manual_seed(0)
    layers_of = [ColumnParallelLinear(6, 4, grid.tp), RowParallelLinear(4, 3, grid.tp), nn.Linear(3, 5)]
    model = nn.Sequential(*layers_of).double()
    fsdp.fully_shard(model[1], mesh=grid.mesh["dp"])
    fsdp.fully_shard(model[2], mesh=grid.mesh["dp"])  # the first stays whole
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    elements = (6 * 4 + 4) + (4 * 3 + 3) + (3 * 5 + 5)
    assert float(grad_norm(model, grid)) == pytest.approx(math.sqrt(elements), rel=1e-12)


def backward(grid, *, sharded):
    """Return a GPT with experts, and the gradients of its replica."""
    config = GPTConfig(vocab_size=16, context=8, layers=2, hidden=8, heads=2, experts=4)
    chunks = gpt_stages(config, grid)
    for part in (*chunks[0].blocks.values(), chunks[0]) if sharded else ():
        fsdp.fully_shard(part, mesh=grid.mesh["dp"])
    replicas = None if sharded else DataParallel(chunks, grid.dp_cp)
    ids = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(grid.dp.rank))
    gpt_loss(config, grid)(chunks[0](ids), ids).backward()
    if replicas:
        replicas.finish_grad_sync()
    return chunks


@torch_world.on(2)
def test_the_norm_with_sharded_experts_is_that_of_dataparallel():
    grid = Grid(dp=2)
    norms = [float(grad_norm(backward(grid, sharded=sharded), grid)) for sharded in (False, True)]
    assert math.isclose(*norms, rel_tol=1e-5)


@torch_world.on(4)
def test_experts_that_are_sharded_over_other_experts_are_refused_on_all_ranks():
    """Let only one stage have an expert with a gradient."""
    grid = Grid(dp=2, ep=2, pp=2)
    stage = Experts(8, 8, 2, grid) if grid.pp.rank else nn.Linear(2, 2)
    fsdp.fully_shard(stage, mesh=grid.mesh["dp"])
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    text = str(raised(ArgumentError if grid.pp.rank else Aborted, lambda: grad_norm(stage, grid)))
    assert "gradient of an expert: expected one sharded over ranks of edp, got one sharded over Axis(name='ep'" in text


@torch_world.on(2, 4)
def test_a_step_of_stage_3_sends_three_times_its_parameters():
    """All-gathers before forward and before backward, and a reduce-scatter: half more than stages 0 to 2."""
    grid = Grid(dp=dist.get_world_size())
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for part in (*model, model):
        fsdp.fully_shard(part, mesh=grid.mesh["dp"])
    for _ in range(2):
        with record_traffic() as calls:
            model(torch.ones(2, 32)).square().sum().backward()
        assert bytes_sent(calls, grid.dp.group) == 3 * whole * Fraction(grid.dp.size - 1, grid.dp.size)
