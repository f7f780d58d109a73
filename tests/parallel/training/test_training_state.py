"""Checkpoints with schedulers and random states, of every optimizer: training goes on as if uninterrupted."""

from functools import partial
from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import sharded
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import (
    DataParallel,
    GPTConfig,
    Grid,
    MixedPrecision,
    Pipeline,
    ShardedOptimizer,
    gpt_loss,
    gpt_stages,
    gpt_tied_weights,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
    seed_ranks,
)
from ringcomm.parallel.model.verify import full_values
from ringcomm.parallel.state.seed import get_rng_states, set_rng_states
from ringcomm.torch.traffic import bytes_sent, record_traffic

ROWS, SAVED, STEPS = 8, 3, 6  # of a batch; steps before the checkpoint, and in all
adamw = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {
    "AdamW": lambda chunks, *_: adamw(nn.ModuleList(chunks).parameters()),
    "ZeroRedundancyOptimizer": lambda chunks, grid, _: sharded(grid)(nn.ModuleList(chunks).parameters(), lr=0.01),
    "MixedPrecision": lambda chunks, grid, _: MixedPrecision(chunks, grid, adamw, torch.bfloat16),
    "ShardedOptimizer": lambda chunks, grid, tied: ShardedOptimizer(chunks, grid, adamw, stage=1, tied=tied),
    "ShardedOptimizer, bfloat16": lambda chunks, grid, tied: ShardedOptimizer(
        chunks, grid, adamw, torch.bfloat16, tied=tied
    ),
    "ShardedOptimizer, float16": lambda chunks, grid, tied: ShardedOptimizer(
        chunks, grid, adamw, torch.float16, tied=tied, bucket_bytes=3000, init_scale=256.0
    ),
}


def warm_up_and_cosine(optimizer):
    """Return a schedule that computes each rate from the one before."""
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, STEPS)]
    return SequentialLR(optimizer, parts, milestones=[2])


def one_cycle(optimizer):
    """Return a schedule that changes betas too."""
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)


class Training:
    """A small GPT whose gradients are accumulated over `parts` of each batch."""

    def __init__(self, layout, kind, seed=0, *, schedule=warm_up_and_cosine, parts=2, dropout=0.0):
        self.grid = grid = Grid(*layout)
        config = GPTConfig(37, 8, layers=2, hidden=16, heads=2, dropout=dropout)
        micro_batches = ROWS // grid.dp.size // parts
        self.chunks, self.parts = [chunk.double() for chunk in gpt_stages(config, grid, seed=seed)], parts
        tied = gpt_tied_weights(self.chunks, grid)
        self.trainer = OPTIMIZERS[kind](self.chunks, grid, tied)
        zero = isinstance(self.trainer, ShardedOptimizer)
        self.pipeline = Pipeline(
            grid,
            self.chunks,
            make_schedule("1f1b", grid.pp.size, micro_batches),
            gpt_loss(config, grid),
            data_parallel=self.trainer if zero else DataParallel(self.chunks, grid.dp),
            tied=() if zero else tied,
        )
        self.optimizer = getattr(self.trainer, "optimizer", self.trainer)
        self.scheduler = schedule(self.optimizer)
        seed_ranks(grid, seed)

    def step(self, number):
        """Return the loss, and the options of the optimizer."""
        ids = (number + 5 * torch.arange(ROWS)[:, None] + torch.arange(9)) % 37
        mine = ids.chunk(self.grid.dp.size)[self.grid.dp.rank].chunk(self.parts)
        scale = getattr(self.trainer, "loss_scale", 1.0) / self.parts
        losses = [self.pipeline.step(part[:, :-1], part[:, 1:], scale) for part in mine]
        options = [self.optimizer.param_groups[0][name] for name in ("lr", "betas")]
        self.trainer.step()
        self.trainer.zero_grad()
        self.scheduler.step()
        return [float(sum(losses)) / self.parts, *options]

    def save(self, path):
        extra = {"step": SAVED, "scheduler": self.scheduler.state_dict(), "rng": get_rng_states(self.grid)}
        save_checkpoint(path, self.chunks, self.trainer, self.grid, extra)

    def load(self, path):
        extra = load_checkpoint(path, self.chunks, self.trainer, self.grid)
        self.scheduler.load_state_dict(extra.pop("scheduler"))
        set_rng_states(extra.pop("rng"), self.grid)
        assert extra == {"step": SAVED}


def saved(path, layout, kind, **options):
    """Return the steps after a checkpoint, and the weights at their end."""
    training = Training(layout, kind, **options)
    before = [training.step(number) for number in range(SAVED)]
    training.save(path)
    after = [training.step(number) for number in range(SAVED, STEPS)]
    assert before[0][1] < before[1][1]  # it warms up
    assert len({rate for _, rate, _ in (*before, *after)}) > 4
    return after, full_values("weight", training.chunks, training.grid)


def resumed(path, layout, kind, **options):
    training = Training(layout, kind, seed=1, **options)
    training.load(path)
    steps = [training.step(number) for number in range(SAVED, STEPS)]
    return steps, full_values("weight", training.chunks, training.grid)


def continued(path, layout, kind, schedule):
    options = {"dropout": 0.2, "schedule": schedule}
    steps, weights = saved(path, layout, kind, **options)
    again, others = resumed(path, layout, kind, **options)
    assert again == steps
    assert weights.keys() == others.keys()
    assert all(torch.equal(x, others[name]) for name, x in weights.items())


@pytest.mark.parametrize(
    ("kind", "layout", "schedule"),
    [
        ("AdamW", (2, 1, 2), warm_up_and_cosine),
        ("ZeroRedundancyOptimizer", (2, 1, 1), warm_up_and_cosine),
        ("MixedPrecision", (1, 2, 1), one_cycle),
        ("ShardedOptimizer, bfloat16", (2, 2, 1), warm_up_and_cosine),
    ],
)
def test_training_goes_on_with_the_same_bits(tmp_path, kind, layout, schedule):
    torch_world.run(continued, prod(layout), tmp_path, layout, kind, schedule)


@pytest.mark.parametrize(
    ("kind", "layout", "others", "tolerance"),
    [
        ("AdamW", (2, 2, 1), [("AdamW", each) for each in [(1, 2, 2), (1, 1, 1), (1, 1, 2)]], 1e-10),
        ("AdamW", (1, 2, 1), [("ShardedOptimizer", (2, 2, 1))], 1e-10),
        ("ZeroRedundancyOptimizer", (2, 2, 1), [("AdamW", (1, 1, 2)), ("ZeroRedundancyOptimizer", (2, 1, 2))], 1e-10),
        (
            "ShardedOptimizer",
            (2, 1, 2),
            [("AdamW", (1, 2, 1)), *(("ShardedOptimizer", each) for each in [(1, 2, 1), (2, 2, 1), (1, 1, 1)])],
            1e-10,
        ),
        ("ShardedOptimizer, float16", (2, 1, 2), [("ShardedOptimizer, float16", (1, 2, 1))], 2e-3),
    ],
)
def test_training_goes_on_with_another_optimizer_on_another_grid(tmp_path, kind, layout, others, tolerance):
    (steps, _), *_ = torch_world.run(saved, prod(layout), tmp_path, layout, kind)
    assert steps[0][0] > steps[-1][0]  # it learns
    for other, on in others:
        for again, _ in torch_world.run(resumed, prod(on), tmp_path, on, other):
            for (loss, *options), (expected, *same) in zip(again, steps, strict=True):
                assert loss == pytest.approx(expected, rel=tolerance)
                assert options == same


@pytest.mark.parametrize("kind", ["AdamW", "ShardedOptimizer"])
@torch_world.on(4)
def test_accumulated_gradients_are_those_of_the_whole_batch(kind):
    found = []
    for parts in (1, 2, 4):
        training = Training((2, 1, 2), kind, parts=parts)
        found.append([training.step(number)[0] for number in range(3)])
    assert found[0][0] > found[0][2]  # it learns
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-12)


# --- Random states ----------------------------------------------------------------------------------------------------


def drawn(path, layout, saves):
    grid = Grid(*layout)
    if saves:
        seed_ranks(grid, 7)
        torch.rand(5)
        with record_traffic() as calls:
            states = get_rng_states(grid)
        assert states["cpu"].shape == (grid.dp.size, grid.pp.size, 5056)
        assert bytes_sent(calls, grid.pp.group) == 5056 * (grid.pp.size - 1)
        assert bytes_sent(calls, grid.dp_cp.group) == 5056 * (grid.dp.size - 1) * grid.pp.size
        if dist.get_rank() == 0:
            torch.save(states, path)
    else:
        set_rng_states(torch.load(path), grid)
    return torch.rand(3).tolist()


def test_random_states_belong_to_replicas_and_stages(tmp_path):
    path = tmp_path / "states"
    before = torch_world.run(drawn, 4, path, (2, 1, 2), True)
    assert len({*map(tuple, before)}) == 4
    assert torch_world.run(drawn, 4, path, (2, 1, 2), False) == before
    stages = torch_world.run(drawn, 4, path, (1, 2, 2), False)  # other replicas: seeded again
    assert stages[0] == stages[1] != stages[2] == stages[3]
    assert stages == torch_world.run(drawn, 4, path, (1, 2, 2), False)
    assert not any(numbers in before for numbers in stages)


@torch_world.on(1)
def test_random_states_of_a_cpu_seed_a_gpu():
    """Watch the calls of torch for a grid that says to be on a GPU."""
    grid, seeds = Grid(), []
    states = get_rng_states(grid)
    grid.device = torch.device("cuda")
    with patch.object(torch.cuda, "manual_seed", seeds.append):
        for _ in range(2):
            set_rng_states(states, grid)
        assert torch.equal(torch.get_rng_state(), states["cpu"][0, 0])
        torch.rand(1)
        set_rng_states({"cpu": torch.get_rng_state()[None, None]}, grid)
    assert seeds[0] == seeds[1] != seeds[2]


# --- Other values -----------------------------------------------------------------------------------------------------


def kept(path):
    grid, model = Grid(dp=2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"name": "x", "deep": {"list": [1, 2.5, None, (True,)]}}

    def refused(value):
        return str(raised(ArgumentError, lambda: save_checkpoint(path, model, optimizer, grid, {"odd": value})))

    texts = [refused({"call": kept if grid.dp.rank else 1}), refused("text" if grid.dp.rank else 1)]
    optimizer.param_groups[0]["lr"] = 0.25
    save_checkpoint(path, model, optimizer, grid, {"state": state, "step": 2, "rate": 0.5})
    other = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight], "momentum": 0.5}], lr=0.1)
    found = load_checkpoint(path, model, other, grid)
    assert found == {"state": state, "step": 2, "rate": 0.5}
    assert [(group["lr"], group["momentum"]) for group in other.param_groups] == [(0.25, 0.0), (0.1, 0.5)]
    return texts


def test_state_dicts_are_kept_and_what_could_not_be_loaded_is_refused_on_all_ranks(tmp_path):
    first, second = torch_world.run(kept, 2, tmp_path)
    assert second[0].startswith("extra value 'odd': expected numbers, strings, tensors, lists and dicts, got ")
    assert second[1] == "extra value 'odd': expected an int, a float or a dict, got str"
    assert first == [f"rank 1: {text}" for text in second]
