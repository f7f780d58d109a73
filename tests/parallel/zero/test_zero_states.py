"""ZeRO: bytes, memory, masters, states that every layout can load, refused arguments and failures."""

import math
from copy import deepcopy
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases.odd_layers import Odd, adamw, loss_of, same, stages
from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, ShardedOptimizer, save_checkpoint
from ringcomm.torch.traffic import bytes_sent, record_traffic


@torch_world.on(2, 4)
@torch_world.each("width", [32, 33])
@stages
def test_a_step_sends_twice_its_parameters_and_one_number(width, stage):
    """Count the bytes of odd sizes too: parameters and shards are padded to multiples of 64 elements."""
    grid = Grid(dp=dist.get_world_size())
    d = grid.dp.size
    model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16))
    for dtype, size in ((None, 4), (torch.bfloat16, 2)):
        zero = ShardedOptimizer(model, grid, adamw, dtype, stage=stage)
        with record_traffic() as calls:
            model(torch.ones(2, 16, dtype=dtype)).square().sum().backward()
            zero.finish_grad_sync()
            zero.step(max_norm=1.0)
        parameters = sum(-(-parameter.numel() // 64) * 64 for parameter in model.parameters())
        padded = -(-parameters // (64 * d)) * 64 * d
        assert bytes_sent(calls, grid.dp.group) == 2 * padded * size * Fraction(d - 1, d)
        assert bytes_sent(calls, grid.world.group) == 8 * 2 * Fraction(d - 1, d)
        del zero


def live_bytes(*tensors):
    """Return the bytes of the memory of tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch_world.on(2, 4)
@stages
def test_a_rank_keeps_4_and_12_over_d_bytes_per_parameter_of_16_bits(stage):
    """Count the bytes of parameters, masters, moments, gradients and their buffers, before the step and after."""
    grid = Grid(dp=dist.get_world_size())
    d, layers, size = grid.dp.size, 8, 64 * 64
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    zero = ShardedOptimizer(model, grid, adamw, torch.bfloat16, stage=stage, bucket_bytes=2 * size)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).square().sum().backward()
        zero.finish_grad_sync()
        pieces = [piece for group in zero.optimizer.param_groups for piece in group["params"]]
        gradients = [tensor for bucket in zero._buckets for tensor in (bucket.grad, bucket._full)]
        if stage == 2:
            gradients += zero._buckets[0]._pool.free
        assert all(parameter.grad is None for parameter in model.parameters())
        staged = 2 * 2 * size
        shard = 2 * layers * size // d
        assert live_bytes(*gradients) == (2 * layers * size if stage == 1 else shard + staged)
        zero.step()
        states = [x for state in zero.optimizer.state.values() for x in state.values() if x.dim()]
        assert live_bytes(*model.parameters()) == 2 * layers * size
        assert live_bytes(*pieces, *states) == 12 * layers * size // d
        assert all(bucket.grad is None for bucket in zero._buckets)


@torch_world.on(2, 4)
@stages
@torch_world.each("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masters_and_loss_scale_are_those_of_mixed_precision(stage, dtype):
    """Compare with a MixedPrecision and a DataParallel; in one step, a gradient of one rank is not finite."""
    grid = Grid(dp=dist.get_world_size())
    model, other = Odd(grid.dp.rank, torch.float32), Odd(grid.dp.rank, torch.float32)
    scaling = {"init_scale": 1024.0, "growth_interval": 2}
    zero = ShardedOptimizer(model, grid, adamw, dtype, stage=stage, bucket_bytes=3000, **scaling)
    mixed = MixedPrecision(other, grid, adamw, dtype, **scaling)
    data_parallel = DataParallel(other, grid.dp, bucket_bytes=3000)
    answers, scales = [], []
    for step in range(5):
        for each, sync, scale in ((model, zero, zero.loss_scale), (other, data_parallel, mixed.loss_scale)):
            loss = loss_of(each, step, grid.dp, dtype) * scale
            (loss * math.inf if step == 1 and grid.dp.rank == 1 else loss).backward()
            sync.finish_grad_sync()
        norm, expected = zero.step(), mixed.step()
        mixed.zero_grad()
        answers.append(norm is not None)
        assert norm == (expected and pytest.approx(expected, rel=1e-6))
        scales.append(zero.loss_scale)
        assert zero.loss_scale == mixed.loss_scale
        same(model, other)
    assert answers == [True, False, True, True, True]
    assert scales == ([1024, 512, 512, 1024, 1024] if dtype == torch.float16 else [1] * 5)
    masters = zero.state_dict()["masters"]
    for number, master in enumerate(mixed.masters):
        assert number not in masters or torch.equal(masters[number], master)
    assert len(masters) == 9


@torch_world.on(2)
def test_invalid_arguments_are_refused_on_all_ranks_and_leave_the_group_usable():
    grid, rank = Grid(dp=2), dist.get_rank()
    model = Odd()

    def refused(*arguments, **options):
        return str(raised(ArgumentError, lambda: ShardedOptimizer(model, grid, *arguments, **options)))

    foreign = nn.Parameter(torch.ones(5))
    texts = [
        refused(adamw, stage=3 if rank else 1),
        refused(adamw, torch.float64),
        refused(lambda _: adamw([foreign])),
        refused(adamw, tied=[(foreign, grid.dp.group)]),
    ]
    half = Odd(dtype=torch.bfloat16)
    texts.append(str(raised(ArgumentError, lambda: ShardedOptimizer(half, grid, adamw))))
    stage = "stage: expected 1 or 2; torch's fully_shard is stage 3, got 3"
    assert texts[0] == (stage if rank else f"rank 1: {stage}")
    assert texts[1] == "dtype: expected None, torch.float32, torch.bfloat16 or torch.float16, got torch.float64"
    assert texts[2] == "optimizer: expected parameters of the chunks only, got another, of shape (5,)"
    assert texts[3] == "tied: expected parameters of the chunks only, got another, of shape (5,)"
    assert texts[4] == "dtype: expected that of the parameters, for masters, got None"
    zero = ShardedOptimizer(model, grid, adamw)
    texts = [str(raised(ArgumentError, zero.step))]
    loss_of(model, 0, grid.dp).backward()
    zero.finish_grad_sync()
    texts.append(str(raised(ArgumentError, lambda: zero.step(max_norm=-1.0))))
    state = zero.state_dict()
    wrong = {**state, "masters": {0: torch.ones(3)}} if rank else state
    texts.append(str(raised(ArgumentError, lambda: zero.load_state_dict(wrong))))
    other = adamw(nn.Linear(2, 2).parameters()).state_dict()
    texts.append(str(raised(ArgumentError, lambda: zero.load_state_dict(other))))
    assert texts[0] == "step without gradients: call finish_grad_sync after backward, on all ranks"
    assert texts[1] == "max_norm: expected at least 0, got -1.0"
    assert texts[2].endswith("shape of master of parameter 0: expected (), got (3,)")
    assert texts[3] == "parameters in each group of the states: expected [11], got [2]"
    zero.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch_world.on(2)
def test_a_checkpoint_keeps_the_buffers_of_each_replica_and_sends_no_states(dtype, tmp_path):
    """Let the replicas have other statistics of a BatchNorm."""
    grid, model = Grid(dp=2), nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    zero = ShardedOptimizer(model, grid, adamw, dtype)
    model[1].running_mean.fill_(grid.dp.rank)
    with record_traffic() as calls:
        save_checkpoint(tmp_path, model, zero, grid, {})
    assert sum(call.payload for call in calls) < 256 * 256  # a plan
    assert model[1].running_mean.tolist() == [grid.dp.rank] * 256


@torch_world.on(2)
def test_a_model_with_units_can_be_copied_and_a_closed_optimizer_leaves_no_hooks():
    grid, model = Grid(dp=2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero = ShardedOptimizer(model, grid, adamw, units=list(model))
    model(torch.ones(2, 4)).square().sum().backward()
    zero.finish_grad_sync()
    zero.step()
    deepcopy(model)  # during an all-gather
    assert all(layer._forward_pre_hooks for layer in model)
    zero.finish_param_sync()
    assert torch.equal(deepcopy(model)(torch.ones(4)), model(torch.ones(4)))
    zero.close()
    assert not any(layer._forward_pre_hooks for layer in (*model, model))
