"""Checkpoints: what one grid wrote another goes on with, as if nothing had happened."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_world
from failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    Grid,
    MixedPrecision,
    Pipeline,
    gpt_loss,
    gpt_stages,
    gpt_tied,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)

CONFIG = GPTConfig(vocabulary=37, context=8, layers=2, hidden=16, heads=2)  # 37 is padded, where it is cut
MICRO_BATCHES = 2


class Training:
    """A small GPT in float64 on a grid, whose batches depend on the number of the step only."""

    def __init__(self, layout, seed):
        self.grid = Grid(*layout)
        self.chunks = [stage.double() for stage in gpt_stages(CONFIG, self.grid, seed=seed)]
        self.optimizer = torch.optim.AdamW(nn.ModuleList(self.chunks).parameters(), lr=0.01)
        self.pipeline = Pipeline(
            self.grid,
            self.chunks,
            make_schedule("1f1b", self.grid.pp.size, MICRO_BATCHES),
            gpt_loss(CONFIG, self.grid),
            replicas=DataParallel(self.chunks, self.grid.dp),
            tied=gpt_tied(self.chunks, self.grid),
        )

    def step(self, number):
        starts = number + 5 * torch.arange(2 * MICRO_BATCHES)[:, None]
        ids = (starts + torch.arange(CONFIG.context + 1)) % CONFIG.vocabulary
        mine = ids.chunk(self.grid.dp.size)[self.grid.dp.rank]
        loss = self.pipeline.step(mine[:, :-1], mine[:, 1:])
        dist.all_reduce(loss, group=self.grid.dp.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() / self.grid.dp.size


def saved(layout, path):
    training = Training(layout, seed=0)
    before = [training.step(number) for number in range(3)]
    save_checkpoint(path, training.chunks, training.optimizer, training.grid, 3)
    return before, [training.step(number) for number in range(3, 6)]


def resumed(layout, path):
    training = Training(layout, seed=1)
    first = load_checkpoint(path, training.chunks, training.optimizer, training.grid)
    assert first == 3
    return [training.step(number) for number in range(first, 6)]


def test_a_checkpoint_goes_on_with_the_same_losses_on_every_grid(tmp_path):
    before, after = torch_world.run(saved, 4, (2, 2, 1), tmp_path)[0]
    assert before[0] > before[2] > after[0]  # it learns
    for layout, size in (((1, 2, 2), 4), ((1, 1, 1), 1), ((1, 1, 2), 2), ((2, 2, 1), 4)):
        for losses in torch_world.run(resumed, size, layout, tmp_path):
            assert losses == pytest.approx(after, rel=1e-10)


def masters(path):
    grid = Grid(tp=2)
    config = replace(CONFIG, vocabulary=38)  # no padding, which has no gradient
    chunks = gpt_stages(config, grid)
    mixed = MixedPrecision(chunks, grid, lambda each: torch.optim.AdamW(each, lr=0.01), torch.bfloat16)
    for parameter in nn.ModuleList(chunks).parameters():
        parameter.grad = torch.ones_like(parameter)
    mixed.step()
    save_checkpoint(path, chunks, mixed.optimizer, grid, 1)
    others = gpt_stages(config, grid, seed=1)
    other = MixedPrecision(others, grid, lambda each: torch.optim.AdamW(each, lr=0.01), torch.bfloat16)
    load_checkpoint(path, others, other.optimizer, grid)
    for mine, theirs in zip(mixed.masters, other.masters, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == torch.float32
    for mine, theirs in zip(nn.ModuleList(chunks).parameters(), nn.ModuleList(others).parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert theirs.dtype == torch.bfloat16


def test_the_masters_of_a_model_of_16_bits_are_kept_in_32(tmp_path):
    torch_world.run(masters, 2, tmp_path)


def other_models(path):
    grid = Grid(tp=2)

    def made(**shape):
        chunks = gpt_stages(replace(CONFIG, **shape), grid)
        return chunks, torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.1)

    save_checkpoint(path, *made(), grid, 0)
    errors = [
        raised(ArgumentError, lambda: load_checkpoint(path, *made(layers=3), grid)),
        raised(ArgumentError, lambda: load_checkpoint(path, *made(vocabulary=41), grid)),
    ]
    chunks, _ = made()
    optimizer = torch.optim.SGD([next(chunks[0].parameters())], lr=0.1)
    errors.append(raised(ArgumentError, lambda: save_checkpoint(path, chunks, optimizer, grid, 0)))
    return [str(error) for error in errors]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    for texts in torch_world.run(other_models, 2, tmp_path):
        assert texts[0].startswith(f"the checkpoint {tmp_path}: expected one with blocks.2.")
        assert texts[1] == "dimension 0 of the full tensor: expected 41, got 37"
        assert texts[2].startswith("the optimizer: expected one of the ")
