"""ZeRO: the bits of DataParallel, and the numbers of one process on every layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases.odd_layers import OPTIMIZERS, Odd, adamw, loss_of, same, sgd, stages
from cases.small_gpt import MICRO_BATCHES, batch_of, config_for, layouts, mine, stepped
from harness import torch_world
from ringcomm.parallel import (
    DataParallel,
    Grid,
    MixedPrecision,
    Pipeline,
    ShardedOptimizer,
    clip_grad_norm,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
    make_schedule,
)
from ringcomm.parallel.model.verify import full_values


@torch_world.on(1, 2, 4)
@stages
@torch_world.each(
    "kind, bucket_bytes", [("sgd", 1), ("adam", 3000), ("adamw", 1 << 20), ("fused", 3000), ("adagrad", 3000)]
)
def test_parameters_have_the_bits_of_dataparallel_and_the_plain_optimizer(stage, kind, bucket_bytes):
    """Train for some steps, of which one accumulates and some leave a layer unused, everywhere or on one rank."""
    grid = Grid(dp=dist.get_world_size())
    for dtype in (torch.float32, torch.float64):
        model, other = Odd(grid.dp.rank, dtype), Odd(grid.dp.rank, dtype)
        zero = ShardedOptimizer(model, grid, OPTIMIZERS[kind], stage=stage, bucket_bytes=bucket_bytes)
        data_parallel = DataParallel(other, grid.dp, bucket_bytes=bucket_bytes)
        optimizer = OPTIMIZERS[kind](other.parameters())
        same(model, other)
        for step in range(5):
            some = step == 2 or (step == 3 and grid.dp.rank == grid.dp.size - 1)
            for each, sync in ((model, zero), (other, data_parallel)):
                if step == 1:
                    with sync.no_sync():
                        loss_of(each, 100, grid.dp, dtype).backward()
                loss_of(each, step, grid.dp, dtype, some).backward()
                sync.finish_grad_sync()
            assert all(parameter.grad is None for parameter in model.parameters())
            zero.step()
            optimizer.step()
            optimizer.zero_grad()
            same(model, other)


@torch_world.on(2, 4, backends=torch_world.BACKENDS)
@stages
def test_training_equals_that_of_one_process_on_the_whole_batch(stage):
    grid, alone = Grid(dp=dist.get_world_size()), Grid.alone()
    model, whole = Odd(), Odd()
    zero = ShardedOptimizer(model, grid, adamw, stage=stage, bucket_bytes=3000)
    optimizer = adamw(whole.parameters())
    for step in range(5):
        loss_of(model, step, grid.dp).backward()
        zero.finish_grad_sync()
        loss_of(whole, step, alone.dp).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert math.isclose(zero.step(max_norm=0.1), expected, rel_tol=1e-12)
        optimizer.step()
        optimizer.zero_grad()
        for x, y in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def gpt_with(grid, stage, schedule, units=False):
    """Return the stages of a GPT in float64, its ZeRO optimizer and its pipeline."""
    config = config_for(grid.tp.size, grid.pp.size, sequence_parallel=grid.tp.size > 1)
    schedule = make_schedule(schedule, grid.pp.size, MICRO_BATCHES, 2 if schedule == "interleaved" else 1)
    chunks = [chunk.double() for chunk in gpt_stages(config, grid, schedule, seed=3)]
    apart = [block for chunk in chunks for block in chunk.blocks.values()] if units else []
    tied = gpt_tied_weights(chunks, grid)
    zero = ShardedOptimizer(chunks, grid, sgd, stage=stage, bucket_bytes=3000, tied=tied, units=apart)
    return config, chunks, zero, Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=zero)


def compared(dp, tp, pp, stage, schedule, units):
    grid, alone = Grid(dp, tp, pp), Grid.alone()
    config, chunks, zero, pipeline = gpt_with(grid, stage, schedule, units)
    whole = [chunk.double() for chunk in gpt_stages(config, alone, seed=3)]
    optimizer = sgd(nn.ModuleList(whole).parameters())
    for step in range(3):
        inputs, targets = batch_of(config, grid, step)
        expected = stepped(whole, gpt_loss(config, alone), inputs, targets)
        loss = pipeline.step(mine(inputs, grid.dp), mine(targets, grid.dp))
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        norm = clip_grad_norm(whole, alone, 0.5)
        assert math.isclose(zero.step(max_norm=0.5), norm, rel_tol=1e-10)
        optimizer.step()
        optimizer.zero_grad()
    zero.finish_param_sync()
    one = full_values("weight", whole, alone)
    for name, x in full_values("weight", chunks, grid).items():
        torch.testing.assert_close(x, one[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "stage", "schedule", "units"),
    [
        *((layout, 1 + n % 2, "1f1b", n % 3 == 0) for n, layout in enumerate([*layouts(2), *layouts(4)])),
        *(((2, 1, 2), 1, "interleaved", True), ((2, 1, 2), 2, "interleaved", False), ((2, 1, 2), 2, "zb-h1", False)),
    ],
    ids=str,
)
def test_a_gpt_on_every_layout_trains_as_in_one_process(layout, stage, schedule, units):
    torch_world.run(compared, math.prod(layout), *layout, stage, schedule, units)


@torch_world.on(2)
def test_parameters_of_units_arrive_while_earlier_modules_compute():
    """Let the second rank send its share of the last unit only after the first has used the unit before."""
    grid = Grid(dp=2)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, dtype=torch.float64) for _ in range(3)]
    model = nn.Sequential(*layers)
    whole = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float64) for _ in range(3)))
    whole.load_state_dict(model.state_dict())
    zero = ShardedOptimizer(model, grid, sgd, units=layers, bucket_bytes=1)
    optimizer = sgd(whole.parameters())
    x = torch.ones(1, 64, dtype=torch.float64)
    seen = []
    layers[0].register_forward_hook(lambda *_: seen.append([shard._gathering is None for shard in zero._shards]))
    for _ in range(3):
        model(x).square().sum().backward()
        zero.finish_grad_sync()
        zero.step()
        whole(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        y = model(x)
        assert torch.equal(y, whole(x))
    assert seen[1] == [False] * 4 + [True] * 2  # the buckets of the last layers come first
    zero.finish_param_sync()
    same(model, whole)


@torch_world.on(2)
def test_backward_of_stage_1_continues_while_buckets_wait_for_other_ranks():
    """Run backward on the second rank only after the first has finished its own."""
    grid, model = Grid(dp=2), Odd()
    zero = ShardedOptimizer(model, grid, adamw, stage=1, bucket_bytes=1)
    ready = torch.zeros(())
    if grid.dp.rank == 1:
        dist.recv(ready, 0)
    loss_of(model, 0, grid.dp).backward()
    if grid.dp.rank == 0:
        dist.send(ready, 1)
    zero.finish_grad_sync()
    zero.step()


@torch_world.on(2)
def test_gradients_may_be_accumulated_and_reduced_in_float32():
    grid = Grid(dp=2)
    model, other = Odd(dtype=torch.float32), Odd(dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, sgd, torch.bfloat16, grad_dtype=torch.float32)
    mixed = MixedPrecision(other, grid, sgd, torch.bfloat16)
    data_parallel = DataParallel(other, grid.dp, grad_dtype=torch.float32)
    for step in range(3):
        for each, sync in ((model, zero), (other, data_parallel)):
            with sync.no_sync():
                loss_of(each, step, grid.dp, torch.bfloat16).backward()
            loss_of(each, step + 10, grid.dp, torch.bfloat16).backward()
            sync.finish_grad_sync()
        zero.step()
        mixed.step()
        mixed.zero_grad()
        same(model, other)


@torch_world.on(2)
def test_the_schedule_of_torch_changes_the_rate_and_groups_keep_their_options():
    grid, model, other = Grid(dp=2), Odd(), Odd()

    def grouped(parameters):
        return torch.optim.AdamW(
            [
                {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.5},
                {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
            ]
        )

    zero, optimizer = ShardedOptimizer(model, grid, grouped), grouped(list(other.parameters()))
    data_parallel = DataParallel(other, grid.dp)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (zero.optimizer, optimizer)]
    for step in range(3):
        for each, sync in ((model, zero), (other, data_parallel)):
            loss_of(each, step, grid.dp).backward()
            sync.finish_grad_sync()
        for each in (zero, optimizer, *schedules):
            each.step()
        optimizer.zero_grad()
        same(model, other)


@torch_world.on(2)
@stages
def test_gradients_of_batches_before_a_step_add_up_and_a_negative_zero_is_a_gradient(stage):
    """Let weight decay show that a parameter whose whole gradient is -0.0 has been used."""
    grid = Grid(dp=2)
    model, other = Odd(), Odd()
    zero = ShardedOptimizer(model, grid, adamw, stage=stage, bucket_bytes=3000)
    data_parallel, optimizer = DataParallel(other, grid.dp), adamw(other.parameters())
    for each, sync in ((model, zero), (other, data_parallel)):
        for batch in range(3):
            loss = loss_of(each, batch, grid.dp) + (each.some.weight * -0.0).sum()
            loss.backward()
            sync.finish_grad_sync()
    before = model.some.weight.clone()
    zero.step()
    optimizer.step()
    assert not torch.equal(model.some.weight, before)
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


@torch_world.on(2)
def test_parameters_stay_aligned_as_matrix_products_need():
    model = nn.Sequential(*(nn.Linear(3 + 2 * each, 5 + 2 * each) for each in range(4)))
    zero = ShardedOptimizer(model, Grid(dp=2), adamw)
    assert zero.parameters
    assert not any(parameter.data_ptr() % 16 for parameter in model.parameters())


class Sides(nn.Module):
    """Layers used in either order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(6))

    def forward(self, x, order):
        for layer in self.layers[::order]:
            x = layer(x)
        return x


@torch_world.on(2)
@stages
def test_replicas_may_fill_buckets_in_different_orders(stage):
    grid, model, other = Grid(dp=2), Sides(), Sides()
    zero = ShardedOptimizer(model, grid, sgd, stage=stage, bucket_bytes=1)
    data_parallel, optimizer = DataParallel(other, grid.dp, bucket_bytes=1), sgd(other.parameters())
    for _ in range(3):
        for each, sync in ((model, zero), (other, data_parallel)):
            each(torch.ones(2, 4, dtype=torch.float64), -1 if grid.dp.rank else 1).square().sum().backward()
            sync.finish_grad_sync()
        zero.step()
        optimizer.step()
        optimizer.zero_grad()
        same(model, other)


@pytest.mark.parametrize("ended", ["closed", "deleted"])
@torch_world.on(2)
def test_an_optimizer_that_has_ended_leaves_gradients_alone_also_those_of_the_next(ended):
    grid, model, whole = Grid(dp=2), Odd(), Odd()
    zero = ShardedOptimizer(model, grid, adamw)
    if ended == "closed":
        zero.close()
    del zero
    data_parallel = DataParallel(model, grid.dp_cp)
    for _ in range(2):
        loss_of(whole, 0, Grid.alone().dp).backward()
        loss_of(model, 0, grid.dp_cp).backward()
        data_parallel.finish_grad_sync()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-12)
