"""Checkpoints: what one grid wrote another goes on with, as if nothing had happened."""

import os
import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

import torch_world
from failures import raised
from ringcomm import ArgumentError, RingcommError
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
    save_checkpoint(path, chunks, mixed, grid, {"step": 1})
    others = gpt_stages(config, grid, seed=1)
    other = MixedPrecision(others, grid, lambda each: torch.optim.AdamW(each, lr=0.01), dtype, patience=3)
    assert load_checkpoint(path, others, other, grid) == {"step": 1}
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

    def made(optimizer=torch.optim.SGD, **shape):
        chunks = gpt_stages(replace(CONFIG, **shape), grid)
        return chunks, optimizer(nn.ModuleList(chunks).parameters(), lr=0.1)

    def refused(call, made):
        return str(raised(ArgumentError, lambda: call(path, *made, grid, *([{}] if call == save_checkpoint else []))))

    texts = [refused(load_checkpoint, made())]
    save_checkpoint(path, *made(), grid, {})
    texts += [refused(load_checkpoint, made(**shape)) for shape in ({"layers": 3}, {"layers": 1}, {"vocabulary": 41})]
    chunks, optimizer = made()
    texts.append(refused(save_checkpoint, (chunks, torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))))
    optimizer.state[chunks[0].embedding.weight]["count"] = 3
    texts.append(refused(save_checkpoint, (chunks, optimizer)))
    chunks, optimizer = made(torch.optim.Adafactor)
    chunks[0].embedding.weight.sum().backward()
    optimizer.step()
    texts.append(refused(save_checkpoint, (chunks, optimizer)))
    return texts


def test_what_is_no_checkpoint_of_the_model_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "checkpoint"
    for texts in torch_world.run(other_models, 2, path):
        assert texts[0].startswith(f"the folder of a checkpoint: expected one that save_checkpoint wrote, got {path} (")
        assert re.match(rf"the checkpoint {path}: expected one with blocks\.2\..*, got one with \d+ others", texts[1])
        assert re.match(rf"the model: expected one with blocks\.1\..*, as the checkpoint {path} has", texts[2])
        assert texts[3] == f"embedding.weight in the checkpoint {path}: expected (41, 16), got (37, 16)"
        assert texts[4] == "what the optimizer works on: expected parameters of the chunks, got another, (3,)"
        assert texts[5] == "the optimizer's state count of embedding.weight: expected a tensor, got 3"
        assert re.match(
            r"the shape of the optimizer's state row_var of embedding.weight, which is cut over tp", texts[6]
        )


class Normed(nn.Sequential):
    """A model with buffers, of which one is no part of its state."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("scratch", torch.full((), float(seed)), persistent=False)


def parts_of_a_model(path):
    """Save a model that is frozen in part, with its other parameters in groups of another order, on one rank only."""
    if dist.get_rank() == 1:
        return
    grid = Grid.alone()
    found = []
    for seed in (1, 2):
        model = Normed(seed)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([{"params": [model[2].bias, model[2].weight]}, {"params": model[1].parameters()}])
        if seed == 1:
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            save_checkpoint(path, [model], optimizer, grid, {})
        else:
            load_checkpoint(path, [model], optimizer, grid)
        states = [optimizer.state[parameter] for parameter in (model[2].weight, model[2].bias)]
        found.append((model.state_dict(), states, float(model.scratch)))
    (saved, states, _), (loaded, loaded_states, scratch) = found
    assert scratch == 2
    torch.testing.assert_close((loaded, loaded_states), (saved, states), rtol=0, atol=0)
    assert saved["1.running_mean"].any()


def test_buffers_are_kept_and_parameters_are_known_by_name_whatever_trains_them(tmp_path):
    torch_world.run(parts_of_a_model, 2, tmp_path)


def memory(path):
    """Return the bytes that the states of an optimizer hold, as they were made and as they were read."""
    grid = Grid(tp=2)
    held = []
    for turn in range(2):
        chunks = gpt_stages(CONFIG, grid)
        optimizer = torch.optim.AdamW(nn.ModuleList(chunks).parameters())
        if turn == 0:
            for parameter in nn.ModuleList(chunks).parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            save_checkpoint(path, chunks, optimizer, grid, {})
        else:
            load_checkpoint(path, chunks, optimizer, grid)
        tensors = [x for state in optimizer.state.values() for x in state.values()]
        held.append(sum(x.untyped_storage().nbytes() for x in tensors))
        assert all(x.is_contiguous() for x in tensors)
    return held


def test_states_that_were_read_take_no_more_memory_than_those_that_were_made(tmp_path):
    for made, read in torch_world.run(memory, 2, tmp_path):
        assert made == read > 0


def one_refuses(path):
    """Return what each rank is told where rank 1 alone has an optimizer, a state or a number that does not fit."""
    grid = Grid(pp=2)
    stage = nn.ModuleDict({str(grid.pp.rank): nn.Linear(2, 2)})
    good = torch.optim.SGD(stage.parameters(), lr=0.1)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    odd = torch.optim.SGD(stage.parameters(), lr=0.1)
    odd.state[next(stage.parameters())]["count"] = 3
    texts = []
    for optimizer, number in ((foreign, 1), (odd, 1), (good, torch.tensor(0.7))):
        mine = (optimizer, number) if grid.pp.rank else (good, 1)
        texts.append(str(raised(ArgumentError, lambda: save_checkpoint(path, stage, mine[0], grid, {"n": mine[1]}))))  # noqa: B023 (called in this turn)
    save_checkpoint(path, stage, good, grid, {"n": 1})
    texts.append(
        str(raised(ArgumentError, lambda: load_checkpoint(path, stage, foreign if grid.pp.rank else good, grid)))
    )
    nothing = None if grid.pp.rank else {}
    mixed = MixedPrecision(stage, grid, partial(torch.optim.SGD, lr=0.1), torch.float32)
    texts.append(str(raised((ArgumentError, TypeError), lambda: save_checkpoint(path, stage, mixed, grid, nothing))))
    nothing = None if grid.pp.rank else stage
    texts.append(str(raised((ArgumentError, TypeError), lambda: load_checkpoint(path, nothing, good, grid))))
    assert load_checkpoint(path, stage, good, grid) == {"n": 1}
    return texts


def test_what_one_rank_refuses_ends_all(tmp_path):
    first, second = torch_world.run(one_refuses, 2, tmp_path)
    assert second[0] == second[3] == "what the optimizer works on: expected parameters of the chunks, got another, (3,)"
    assert second[1] == "the optimizer's state count of 1.weight: expected a tensor, got 3"
    assert second[2] == "the number 'n': expected an int or a float, got Tensor"
    kinds = ["ArgumentError"] * 4 + ["TypeError"] * 2
    assert first == [f"rank 1 cannot go on: {kind}: {text}" for kind, text in zip(kinds, second, strict=True)]


def damage(path, how):
    grid = Grid(tp=dist.get_world_size())
    chunks = gpt_stages(CONFIG, grid)
    optimizer = torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.1)
    if how == "write":
        path.write_text("a file where the folder should be")
        dist.barrier()
        return str(raised(RingcommError, lambda: save_checkpoint(path, chunks, optimizer, grid, {})))
    save_checkpoint(path, chunks, optimizer, grid, {})
    if grid.world.rank == 0:
        file = max(path.glob("*.distcp"))  # which the last rank has written
        file.unlink() if how == "remove" else os.truncate(file, 1000)
    dist.barrier()
    text = str(raised(RingcommError, lambda: load_checkpoint(path, chunks, optimizer, grid)))
    dist.barrier()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "(EOF|Runtime)Error: "),
        ("remove", "FileNotFoundError: "),
        ("write", "(FileExists|NotADirectory)Error: "),
    ],
)
def test_files_that_cannot_be_written_or_read_are_told_on_all_ranks(tmp_path, ranks, how, words):
    path = tmp_path / "checkpoint"
    (text,) = {*torch_world.run(damage, ranks, path, how)}
    assert re.match(rf"the checkpoint {path}: rank \d failed: {words}", text)


def asked_for(path):
    """Return the numbers of all states that a ZeroRedundancyOptimizer was read with, and those that were asked for."""
    grid, model = Grid(dp=2), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = sharded(grid)(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(path, model, optimizer, grid, {})
    asked = []

    def counting(wanted, **options):
        asked.extend(wanted)
        return load(wanted, **options)

    with patch("ringcomm.parallel.checkpoint.load", counting):
        load_checkpoint(path, model, optimizer, grid)
    mine = sum(len(state) for state in optimizer.optim.state.values())
    return mine, len([name for name in asked if ":" in name])


def test_a_replica_reads_its_own_share_of_the_states(tmp_path):
    for mine, asked in torch_world.run(asked_for, 2, tmp_path):
        assert mine == asked > 0


def same_names(path):
    grid = Grid(pp=2)
    layer = nn.Linear(2, 2)
    texts = []
    for chunks in ([nn.Sequential(layer)], [nn.Sequential(layer), nn.Sequential(nn.Linear(2, 2))]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        texts.append(str(raised(ArgumentError, lambda: save_checkpoint(path, chunks, optimizer, grid, {}))))  # noqa: B023 (called in this turn)
    stage = nn.ModuleDict({str(grid.pp.rank): layer})
    save_checkpoint(path, stage, torch.optim.SGD(stage.parameters(), lr=0.1), grid, {})
    return texts


def test_stages_with_parameters_of_the_same_name_are_refused(tmp_path):
    for texts in torch_world.run(same_names, 2, tmp_path):
        words = "the names of parameters: expected each in one stage, as in the full model, got"
        assert texts[0] == f"{words} 0.weight on ranks 0 and 1 of the pipeline"
        assert texts[1] == f"{words} 0.weight on two chunks of a rank"


def compiled(path):
    """Save a stage, and read it into one that is compiled."""
    grid = Grid(tp=2)
    (stage,), (other,) = gpt_stages(CONFIG, grid), gpt_stages(CONFIG, grid, seed=1)
    save_checkpoint(path, stage, torch.optim.SGD(stage.parameters(), lr=0.1), grid, {})
    load_checkpoint(path, torch.compile(other), torch.optim.SGD(other.parameters(), lr=0.1), grid)
    for mine, theirs in zip(stage.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_compiled_module_has_the_names_of_the_module(tmp_path):
    torch_world.run(compiled, 2, tmp_path)
