"""Shared by tests of pipelines: stages, batches, pipelines, and the same computation in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn

from harness import torch_world
from ringcomm.parallel import DataParallel, Grid, Pipeline, gpt_loss, gpt_stages, gpt_tied_weights
from ringcomm.pipelining.schedule import make_schedule

WIDTH, ROWS = 6, 2  # rows of a micro-batch
MICRO_BATCHES = 8
SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
schedules = pytest.mark.parametrize(("name", "chunks"), SHAPES)


def with_each(fn, shapes, *arguments):
    """Call `fn(name, chunks, *arguments)` for each of these schedules."""
    torch_world.each("name, chunks", shapes)(fn)(*arguments)


class Residual(nn.Module):
    """A stage whose gradient is a sum, so the order of additions shows in the last bit."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        return x + self.inner(x)


def layers(count, dtype=torch.float64):
    torch.manual_seed(0)
    return [Residual(WIDTH).to(dtype) for _ in range(count)]


def batch(rows, step=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, WIDTH, generator=draw, dtype=dtype) for _ in range(2))


def one_by_one(model, inputs, targets, micro_batches):
    """Return the loss of a batch and add to the gradients, as a pipeline must."""
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = F.mse_loss(model(x), target) / micro_batches
        loss.backward()
        total += loss.detach()
    return total


def pipeline(name, chunks, micro_batches=MICRO_BATCHES, **options):
    """Return a pipeline over the world, the stages of this rank, and the stages of the whole model."""
    grid = Grid(pp=dist.get_world_size())
    schedule = make_schedule(name, grid.pp.size, micro_batches, chunks)
    mine, whole = layers(schedule.stages), layers(schedule.stages)
    stages = [schedule.stage(grid.pp.rank, chunk) for chunk in range(chunks)]
    return Pipeline(grid, [mine[s] for s in stages], schedule, F.mse_loss, **options), stages, whole


def gpt_pipeline(config, grid, schedule, *, dtype=torch.float64, seed=0, **options):
    """Return the stages of a GPT and their pipeline, with replicas and tied weights."""
    chunks = [stage.to(dtype) for stage in gpt_stages(config, grid, schedule, seed=seed)]
    data_parallel, tied = DataParallel(chunks, grid.dp_cp, **options), gpt_tied_weights(chunks, grid)
    return chunks, Pipeline(grid, chunks, schedule, gpt_loss(config, grid), data_parallel=data_parallel, tied=tied)
