"""Checkpoints: what one grid wrote another goes on with, as if nothing had happened."""

from dataclasses import replace
from functools import partial

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

    def __init__(self, layout, seed, zero):
        self.grid = Grid(*layout)
        self.chunks = [stage.double() for stage in gpt_stages(CONFIG, self.grid, seed=seed)]
        make = sharded(self.grid) if zero else torch.optim.AdamW
        self.optimizer = make(nn.ModuleList(self.chunks).parameters(), lr=0.01)
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


def sharded(grid):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns, where it is imported

    return partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, process_group=grid.dp.group)


def saved(layout, path, zero):
    training = Training(layout, 0, zero)
    before = [training.step(number) for number in range(3)]
    save_checkpoint(path, training.chunks, training.optimizer, training.grid, {"step": 3, "rate": 0.1})
    return before, [training.step(number) for number in range(3, 6)]


def resumed(layout, path, zero):
    training = Training(layout, 1, zero)
    numbers = load_checkpoint(path, training.chunks, training.optimizer, training.grid)
    assert numbers == {"step": 3, "rate": 0.1}
    if zero:
        states, every = training.optimizer.optim.state, list(nn.ModuleList(training.chunks).parameters())
        assert 0 < len(states) < len(every)  # what a replica does not step it does not keep
    return [training.step(number) for number in range(numbers["step"], 6)]


def test_a_checkpoint_goes_on_with_the_same_losses_on_every_grid(tmp_path):
    before, after = torch_world.run(saved, 4, (2, 2, 1), tmp_path, False)[0]
    assert before[0] > before[2] > after[0]  # it learns
    for layout, size in (((1, 2, 2), 4), ((1, 1, 1), 1), ((1, 1, 2), 2), ((2, 2, 1), 4)):
        for losses in torch_world.run(resumed, size, layout, tmp_path, False):
            assert losses == pytest.approx(after, rel=1e-10)


def test_states_that_replicas_share_fit_every_grid_too(tmp_path):
    _, after = torch_world.run(saved, 4, (2, 2, 1), tmp_path, True)[0]
    for layout, size, zero in (((1, 1, 2), 2, False), ((2, 1, 2), 4, True)):
        for losses in torch_world.run(resumed, size, layout, tmp_path, zero):
            assert losses == pytest.approx(after, rel=1e-10)


def masters(path, dtype, scales):
    grid = Grid(tp=2)
    config = replace(CONFIG, vocabulary=38)  # no padding, which has no gradient
    chunks = gpt_stages(config, grid)
    mixed = MixedPrecision(chunks, grid, lambda each: torch.optim.AdamW(each, lr=0.01), dtype, scale=1024.0, patience=3)
    for parameter in nn.ModuleList(chunks).parameters():
        parameter.grad = torch.ones_like(parameter)
    mixed.step()
    save_checkpoint(path, chunks, mixed.optimizer, grid, mixed.state_dict())
    others = gpt_stages(config, grid, seed=1)
    other = MixedPrecision(others, grid, lambda each: torch.optim.AdamW(each, lr=0.01), dtype, patience=3)
    other.load_state_dict(load_checkpoint(path, others, other.optimizer, grid))
    for mine, theirs in zip(mixed.masters, other.masters, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == torch.float32
    for mine, theirs in zip(nn.ModuleList(chunks).parameters(), nn.ModuleList(others).parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert theirs.dtype == dtype
    for scale in scales:
        assert other.scale == scale
        other.step()


@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float16, [1024.0, 1024.0, 2048.0]), (torch.bfloat16, [1.0, 1.0, 1.0])], ids=str
)
def test_a_model_of_16_bits_goes_on_with_its_masters_of_32_and_its_scale(tmp_path, dtype, scales):
    torch_world.run(masters, 2, tmp_path, dtype, scales)


def other_models(path):
    grid = Grid(tp=2)

    def made(**shape):
        chunks = gpt_stages(replace(CONFIG, **shape), grid)
        return chunks, torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.1)

    save_checkpoint(path, *made(), grid, {})
    errors = [
        raised(ArgumentError, lambda: load_checkpoint(path, *made(layers=3), grid)),
        raised(ArgumentError, lambda: load_checkpoint(path, *made(vocabulary=41), grid)),
    ]
    chunks, _ = made()
    optimizer = torch.optim.SGD([next(chunks[0].parameters())], lr=0.1)
    errors.append(raised(ArgumentError, lambda: save_checkpoint(path, chunks, optimizer, grid, {})))
    chunks, optimizer = made()
    optimizer.state[chunks[0].embedding.weight]["count"] = 3
    errors.append(raised(ArgumentError, lambda: save_checkpoint(path, chunks, optimizer, grid, {})))
    return [str(error) for error in errors]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    for texts in torch_world.run(other_models, 2, tmp_path):
        assert texts[0].startswith(f"the checkpoint {tmp_path}: expected one with blocks.2.")
        assert texts[1] == "dimension 0 of the full tensor: expected 41, got 37"
        assert texts[2].startswith("the optimizer: expected one of the ")
        assert texts[3] == "the optimizer's state count of embedding.weight: expected a tensor, got 3"
