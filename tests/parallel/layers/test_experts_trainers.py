"""Experts with ShardedOptimizer, MixedPrecision and the loss scale of a Pipeline, and in a GPT."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from cases.expert_blocks import B, Stage, batches_of, one_by_one
from cases.odd_layers import same
from cases.small_gpt import compared, config_for
from harness import torch_world
from ringcomm.parallel import (
    DataParallel,
    Grid,
    MixedPrecision,
    Pipeline,
    ShardedOptimizer,
    gpt_stages,
    grad_norm,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from ringcomm.parallel.model.verify import full_values

adamw = partial(torch.optim.AdamW, lr=0.01)


def accumulated(grid, model, step):
    """Run backward on this replica's batch."""
    x, y = batches_of(grid.dp.size, step)[grid.dp.rank]
    dtype = next(model.parameters()).dtype
    F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (4, 2)])
@torch_world.on(4)
def test_zero_gives_the_bits_of_dataparallel(stage, dp, ep):
    grid = Grid(dp=dp, ep=ep, tp=4 // dp)
    model, other = Stage(grid, seed=grid.dp.rank), Stage(grid, seed=grid.dp.rank)
    zero = ShardedOptimizer(model, grid, adamw, stage=stage, bucket_bytes=3000)
    data_parallel, optimizer = DataParallel(other, grid.dp_cp, bucket_bytes=3000), adamw(other.parameters())
    for step in range(3):
        for each, sync in ((model, zero), (other, data_parallel)):
            accumulated(grid, each, step)
            sync.finish_grad_sync()
        assert math.isclose(zero.step(), grad_norm(other, grid), rel_tol=1e-12)
        optimizer.step()
        optimizer.zero_grad()
        same(model, other)


def trained(sizes, path, *, load):
    """Train three steps with ZeRO, or load the first of them; return the weights of the whole model."""
    grid = Grid.parse(sizes)
    model = Stage(grid, seed=7 if load else 1)
    zero = ShardedOptimizer(model, grid, adamw, stage=2, bucket_bytes=3000)
    if load:
        load_checkpoint(path, model, zero, grid)
    for step in range(1 if load else 0, 3):
        with zero.no_sync():
            one_by_one(model, batches_of(2, step)[grid.dp.rank :: grid.dp.size])
        zero.finish_grad_sync()
        zero.step(max_norm=0.1)
        if step == 0:
            save_checkpoint(path, model, zero, grid, {})
    return full_values("weight", [model], grid)


def test_states_of_zero_continue_on_grids_with_other_experts(tmp_path):
    expected = torch_world.run(partial(trained, load=False), 2, "dp=2,ep=2", str(tmp_path))[0]
    for size, sizes in ((1, "dp=1"), (2, "dp=2"), (4, "dp=2,ep=2,tp=2")):
        for weights in torch_world.run(partial(trained, load=True), size, sizes, str(tmp_path)):
            assert weights.keys() == expected.keys()
            for name, x in weights.items():
                torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch_world.on(4)
def test_masters_of_experts_start_from_the_first_rank_that_holds_them(dtype):
    grid = Grid(dp=4, ep=2)
    model = Stage(grid, seed=grid.dp.rank).float()
    training = MixedPrecision(model, grid, adamw, dtype)
    DataParallel(model, grid.dp_cp)
    first, drawn_here = Stage(grid, seed=0).float(), Stage(grid, seed=grid.ep.rank).float()
    for (name, parameter), master in zip(model.named_parameters(), training.masters, strict=True):
        expected = (drawn_here if "experts" in name else first).state_dict()[name]
        assert torch.equal(master, expected), name
        assert torch.equal(parameter, expected.to(dtype)), name


@torch_world.on(2)
def test_a_pipeline_multiplies_balance_losses_by_the_loss_scale():
    grid = Grid(pp=2)
    found = []
    for scale in (1.0, 1024.0):
        stage = Stage(grid, [grid.pp.rank], balance=0.5)
        pipeline = Pipeline(grid, stage, make_schedule("1f1b", 2, 2), F.mse_loss)
        pipeline.step(*batches_of(1, 0, rows=2 * B)[0], scale)
        found.append([parameter.grad / scale for parameter in stage.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@torch_world.on(4)
def test_a_gpt_with_experts_trains_as_one_process(tp, pp):
    options = {"experts": 4, "experts_every": 2, "capacity_factor": 1.0, "sequence_parallel": tp > 1}
    config = config_for(tp, pp, **options)
    (whole,) = gpt_stages(config, Grid.alone())
    names = {name.split(".")[1] for name, _ in whole.named_parameters() if "experts" in name}
    assert names == {str(layer) for layer in range(1, config.layers, 2)}
    compared(2, tp, pp, "1f1b", options, 2, torch.float64, 1e-10, ep=2)
