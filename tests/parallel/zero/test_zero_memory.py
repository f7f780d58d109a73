"""The peak memory of a training step, counted tensor by tensor, is that of the formulas for ZeRO stages 0 to 3."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import torch_world
from harness.live_memory import LiveMemory
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, ShardedOptimizer, clip_grad_norm

fsdp = pytest.importorskip("torch.distributed.fsdp")

LAYERS, WIDTH = 32, 64
PARAMETERS = LAYERS * WIDTH * WIDTH
BUCKET = 2 * WIDTH * WIDTH  # bytes: a bucket, or a block, is a layer in 16 bits
adamw = partial(torch.optim.AdamW, lr=1e-3)


class Replicated:
    """Stage 0."""

    def __init__(self, model, grid):
        self.mixed = MixedPrecision(model, grid, adamw, torch.bfloat16)
        self.finish_grad_sync = DataParallel(model, grid.dp, bucket_bytes=BUCKET).finish_grad_sync

    def step(self, max_norm):
        self.mixed.step(max_norm)
        self.mixed.zero_grad()


class FullySharded:
    """Stage 3: torch's."""

    def __init__(self, model, grid):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*model, model):
            fsdp.fully_shard(part, mesh=grid.mesh["dp"], mp_policy=policy)
        self.model, self.grid, self.optimizer = model, grid, adamw(model.parameters())

    def finish_grad_sync(self):
        pass

    def step(self, max_norm):
        clip_grad_norm(self.model, self.grid, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


TRAINERS = {
    0: Replicated,
    1: partial(ShardedOptimizer, optimizer=adamw, dtype=torch.bfloat16, stage=1, bucket_bytes=BUCKET),
    2: partial(ShardedOptimizer, optimizer=adamw, dtype=torch.bfloat16, stage=2, bucket_bytes=BUCKET),
    3: FullySharded,
}


def formulas(stage, d):
    """Return the bytes during backward, as in the table of docs/parallel.md, and during the optimizer's step."""
    held, stepping, buckets = {
        0: (16, 20, 0),
        1: (4 + 12 / d, 4 + 16 / d, 0),
        2: (2 + 14 / d, 2 + 16 / d, 2),
        3: (16 / d, 16 / d, 1),
    }[stage]
    return [per_parameter * PARAMETERS + buckets * BUCKET for per_parameter in (held, stepping)]


@pytest.mark.parametrize(
    "stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="torch 2.6"))]
)
@torch_world.on(2, 4)
def test_the_peak_of_a_step_is_within_five_percent_of_the_formulas(stage):
    grid = Grid(dp=dist.get_world_size())
    with LiveMemory() as memory:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        trainer = TRAINERS[stage](model, grid)
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
        for _ in range(2):  # the first creates the states
            memory.peak = 0
            model(x).square().sum().backward()
            trainer.finish_grad_sync()
            backward, memory.peak = memory.peak, 0
            trainer.step(1.0)
    for found, formula in zip((backward, memory.peak), formulas(stage, grid.dp.size), strict=True):
        assert 0.95 < found / formula < 1.05


def test_live_memory_counts_each_memory_once_and_as_long_as_it_lives():
    with LiveMemory() as memory:
        x = torch.zeros(1000)
        y = x[10:].view(-1, 2) + 1
        assert memory.bytes == memory.peak == 4000 + 3960
        z = x[:5]
        del x, y
        assert memory.bytes == 4000
        z.untyped_storage().resize_(0)  # as fully_shard frees parameters
        assert memory.bytes == 0
    assert memory.peak == 4000 + 3960
