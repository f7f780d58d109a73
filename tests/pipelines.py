"""What tests of pipelines share: stages, batches, a pipeline over the world, and what one process makes of the same."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.parallel import Grid, Pipeline
from ringcomm.parallel.schedule import make_schedule

WIDTH, ROWS = 6, 2  # rows of a micro-batch
MICRO_BATCHES = 8
SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
schedules = pytest.mark.parametrize(("name", "chunks"), SHAPES)


class Residual(nn.Module):
    """A stage whose gradient is a sum of two, in an order that matters to its last bit."""

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
    """Return the loss of a batch, and add to the gradients: what a pipeline must do."""
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = F.mse_loss(model(x), target) / micro_batches
        loss.backward()
        total += loss.detach()
    return total


def pipeline(name, chunks, micro_batches=MICRO_BATCHES, **options):
    """Return this rank's end of a pipeline over the world, and the whole model in one process."""
    grid = Grid(pp=dist.get_world_size())
    schedule = make_schedule(name, grid.pp.size, micro_batches, chunks)
    mine, whole = layers(schedule.stages), layers(schedule.stages)
    stages = [schedule.stage(grid.pp.rank, chunk) for chunk in range(chunks)]
    return Pipeline(grid, [mine[s] for s in stages], schedule, F.mse_loss, **options), stages, whole
