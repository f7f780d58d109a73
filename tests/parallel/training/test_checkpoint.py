"""Checkpoints: training continues on another grid as if uninterrupted."""

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

from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, RingcommError
from ringcomm.parallel import (
    GPTConfig,
    Grid,
    MixedPrecision,
    ShardedOptimizer,
    gpt_stages,
    load_checkpoint,
    save_checkpoint,
)

CONFIG = GPTConfig(vocab_size=37, context=8, layers=2, hidden=16, heads=2)  # 37 is padded if sharded


def sharded(grid):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns at import

    return partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, process_group=grid.dp.group)


@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float16, [1024.0, 1024.0, 2048.0]), (torch.bfloat16, [1.0, 1.0, 1.0])], ids=str
)
@torch_world.on(2)
def test_a_checkpoint_keeps_float32_masters_their_states_and_the_loss_scale(tmp_path, dtype, scales):
    grid = Grid(tp=2)
    config = replace(CONFIG, vocab_size=38)  # no padding: it has no gradient
    chunks = gpt_stages(config, grid)
    mixed = MixedPrecision(
        chunks, grid, lambda each: torch.optim.AdamW(each, lr=0.01), dtype, init_scale=1024.0, growth_interval=3
    )
    for parameter in nn.ModuleList(chunks).parameters():
        parameter.grad = torch.ones_like(parameter)
    mixed.step()
    save_checkpoint(tmp_path, chunks, mixed, grid, {"step": 1})
    others = gpt_stages(config, grid, seed=1)
    other = MixedPrecision(others, grid, lambda each: torch.optim.AdamW(each, lr=0.01), dtype, growth_interval=3)
    assert load_checkpoint(tmp_path, others, other, grid) == {"step": 1}
    for mine, theirs in zip(mixed.masters, other.masters, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == torch.float32
    for mine, theirs in zip(nn.ModuleList(chunks).parameters(), nn.ModuleList(others).parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert theirs.dtype == dtype
    states = [[x for state in each.optimizer.state.values() for x in state.values()] for each in (mixed, other)]
    made, loaded = (sum(x.untyped_storage().nbytes() for x in tensors) for tensors in states)
    assert loaded == made > 0
    assert all(x.is_contiguous() for x in states[1])
    for scale in scales:
        assert other.loss_scale == scale
        other.step()


@torch_world.on(2)
def test_checkpoints_of_other_models_and_states_of_other_shapes_are_refused_on_all_ranks(tmp_path):
    path = tmp_path / "checkpoint"
    grid = Grid(tp=2)

    def made(optimizer=torch.optim.SGD, **shape):
        chunks = gpt_stages(replace(CONFIG, **shape), grid)
        return chunks, optimizer(nn.ModuleList(chunks).parameters(), lr=0.1)

    def refused(call, made):
        return str(raised(ArgumentError, lambda: call(path, *made, grid, *([{}] if call == save_checkpoint else []))))

    texts = [refused(load_checkpoint, made())]
    save_checkpoint(path, *made(), grid, {})
    texts += [refused(load_checkpoint, made(**shape)) for shape in ({"layers": 3}, {"layers": 1}, {"vocab_size": 41})]
    chunks, optimizer = made(torch.optim.Adafactor)
    chunks[0].embedding.weight.sum().backward()
    optimizer.step()
    texts.append(refused(save_checkpoint, (chunks, optimizer)))
    assert texts[0].startswith(f"checkpoint folder: expected one written by save_checkpoint, got {path} (")
    start = rf"checkpoint {path}: expected the \d+ parameters of this model, got \d+, "
    assert re.fullmatch(start + r"without blocks\.2\.\S+ and \d+ more", texts[1])
    assert re.fullmatch(start + r"but with blocks\.1\.\S+ and \d+ more", texts[2])
    assert texts[3] == f"embedding.weight in checkpoint {path}: expected (41, 16), got (37, 16)"
    assert texts[4].startswith("shape of the optimizer state row_var of embedding.weight, which is sharded over tp")


class Normed(nn.Sequential):
    """A model with buffers, one of them not persistent."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("scratch", torch.full((), float(seed)), persistent=False)


@torch_world.on(2)
def test_buffers_are_saved_and_states_belong_to_parameters_by_name(tmp_path):
    """Save a partly frozen model, with its parameters in groups of another order, on one rank only."""
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
            save_checkpoint(tmp_path, [model], optimizer, grid, {})
        else:
            load_checkpoint(tmp_path, [model], optimizer, grid)
        states = [optimizer.state[parameter] for parameter in (model[2].weight, model[2].bias)]
        found.append((model.state_dict(), states, float(model.scratch)))
    (saved, states, _), (loaded, loaded_states, scratch) = found
    assert scratch == 2
    torch.testing.assert_close((loaded, loaded_states), (saved, states), rtol=0, atol=0)
    assert saved["1.running_mean"].any()


def one_refuses(path):
    """Return the errors of each rank where only rank 1 passes an invalid optimizer, state, value or argument."""
    grid = Grid(pp=2)
    stage = nn.ModuleDict({str(grid.pp.rank): nn.Linear(2, 2)})
    good, odd = (torch.optim.SGD(stage.parameters(), lr=0.1) for _ in range(2))
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    odd.state[next(stage.parameters())]["count"] = object()
    mixed = MixedPrecision(stage, grid, partial(torch.optim.SGD, lr=0.1), torch.float32)

    def refused(call, *valid, **invalid):
        arguments = dict(zip(("chunks", "optimizer", "extra"), valid, strict=False))
        arguments |= invalid if grid.pp.rank else {}
        return str(raised((RingcommError, TypeError), lambda: call(path, grid=grid, **arguments)))

    texts = [
        refused(save_checkpoint, stage, good, {"n": 1}, optimizer=foreign),
        refused(save_checkpoint, stage, good, {"n": 1}, optimizer=odd),
        refused(save_checkpoint, stage, good, {"n": 1}, extra={"n": torch.tensor(0.7)}),
        refused(save_checkpoint, stage, mixed, {}, extra=None),
    ]
    save_checkpoint(path, stage, good, grid, {"n": 1})
    texts.append(refused(load_checkpoint, stage, good, optimizer=foreign))
    texts.append(refused(load_checkpoint, stage, good, chunks=None))
    assert load_checkpoint(path, stage, good, grid) == {"n": 1}
    return texts


def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    first, second = torch_world.run(one_refuses, 2, tmp_path)
    assert second[0] == second[4] == "optimizer: expected parameters of the chunks only, got another, of shape (3,)"
    assert second[1].startswith(
        "optimizer states of 1.weight: expected numbers, strings, tensors, lists and dicts, got"
    )
    assert second[2] == "extra value 'n': expected an int, a float or a dict, got Tensor"
    assert second[3] == "extra: expected a dict of values, got None"
    kinds = ["", "", "", "", "", "TypeError: "]  # others than ArgumentError are named
    assert first == [f"rank 1: {kind}{text}" for kind, text in zip(kinds, second, strict=True)]


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
        file = max(path.glob("*.distcp"))  # written by the last rank
        file.unlink() if how == "remove" else os.truncate(file, 1000)
    dist.barrier()
    text = str(raised(RingcommError, lambda: load_checkpoint(path, chunks, optimizer, grid)))
    dist.barrier()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "error"), [("cut", "(EOF|Runtime)"), ("remove", "FileNotFound"), ("write", "(FileExists|NotADirectory)")]
)
def test_file_errors_of_one_rank_are_raised_on_all(tmp_path, ranks, how, error):
    path = tmp_path / "checkpoint"
    (text,) = {*torch_world.run(damage, ranks, path, how)}
    assert re.match(rf"checkpoint {path}: rank \d failed: {error}Error(: |$)", text)


@torch_world.on(2)
def test_a_replica_reads_only_its_share_of_the_states(tmp_path):
    grid, model = Grid(dp=2), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = sharded(grid)(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, grid, {})
    with patch("ringcomm.parallel.state.checkpoint.load", wraps=load) as loaded:
        load_checkpoint(tmp_path, model, optimizer, grid)
    mine = sum(len(state) for state in optimizer.optim.state.values())
    asked = len([name for name in loaded.call_args.args[0] if name.find(":") > 0])
    assert mine == asked > 0


@torch_world.on(2)
def test_parameters_of_the_same_name_are_refused(tmp_path):
    grid = Grid(pp=2)
    layer = nn.Linear(2, 2)
    texts = []
    for chunks in ([nn.Sequential(layer)], [nn.Sequential(layer), nn.Sequential(nn.Linear(2, 2))]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        texts.append(str(raised(ArgumentError, lambda: save_checkpoint(tmp_path, chunks, optimizer, grid, {}))))  # noqa: B023 (called in this turn)
    stage = nn.ModuleDict({str(grid.pp.rank): layer})
    save_checkpoint(tmp_path, stage, torch.optim.SGD(stage.parameters(), lr=0.1), grid, {})
    words = "names: expected each in one stage, as in the full model, or equal buffers, got"
    assert texts[0] == f"{words} 0.weight on ranks 0 and 1 of the pipeline"
    assert texts[1] == f"{words} 0.weight on two chunks of a rank"


class Masked(nn.Module):
    """A stage with a buffer that other stages have too."""

    def __init__(self, layer, mask):
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(2, 2)})
        self.register_buffer("mask", torch.tensor(mask))


@pytest.mark.parametrize("chunks", [1, 2])
@torch_world.on(2)
def test_stages_may_have_a_buffer_in_common_and_others_are_refused(chunks, tmp_path):
    grid = Grid(pp=2)

    def stages(masks):
        return [Masked(chunk * 2 + grid.pp.rank, mask) for chunk, mask in enumerate(masks)]

    def saved_from(masks):
        made = stages(masks)
        save_checkpoint(tmp_path, made, torch.optim.SGD(nn.ModuleList(made).parameters()), grid, {})

    saved_from([[True, False]] * chunks)
    loaded = stages([[False, False]] * chunks)
    load_checkpoint(tmp_path, loaded, torch.optim.SGD(nn.ModuleList(loaded).parameters()), grid)
    assert [stage.mask.tolist() for stage in loaded] == [[True, False]] * chunks
    other = [[True, False]] * (chunks - 1) + [[True, grid.pp.rank == 1]]
    text = str(raised(ArgumentError, lambda: saved_from(other)))
    assert "names: expected each in one stage, as in the full model, or equal buffers, got mask on" in text


@torch_world.on(2)
def test_a_compiled_module_keeps_its_parameter_names(tmp_path):
    """Save a stage and load it into a compiled one."""
    grid = Grid(tp=2)
    (stage,), (other,) = gpt_stages(CONFIG, grid), gpt_stages(CONFIG, grid, seed=1)
    save_checkpoint(tmp_path, stage, torch.optim.SGD(stage.parameters(), lr=0.1), grid, {})
    load_checkpoint(tmp_path, torch.compile(other), torch.optim.SGD(other.parameters(), lr=0.1), grid)
    for mine, theirs in zip(stage.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["plain", "mixed", "zero"])
@torch_world.on(2)
def test_parameters_without_elements_are_saved_and_loaded(tmp_path, kind):
    grid, adamw = Grid(dp=2), partial(torch.optim.AdamW, lr=0.1)

    def made():
        model = nn.Linear(3, 2)
        model.empty, model.none = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(4, 0))
        if kind == "plain":
            return model, adamw(model.parameters())
        if kind == "mixed":
            return model, MixedPrecision(model, grid, adamw, torch.bfloat16)
        return model, ShardedOptimizer(model, grid, adamw)

    torch.manual_seed(0)
    (model, optimizer), (other, loaded) = made(), made()
    save_checkpoint(tmp_path, model, optimizer, grid, {})
    load_checkpoint(tmp_path, other, loaded, grid)
    assert torch.equal(model.weight, other.weight)
    assert [tuple(each.shape) for each in (other.empty, other.none)] == [(0,), (4, 0)]


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("AdamW", "Adagrad"), ("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW", "Adam")]
)
@torch_world.on(2)
def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(tmp_path, saved, loaded, zero):
    grid = Grid(dp=2)

    def made(kind, seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        if zero:
            return model, ShardedOptimizer(model, grid, OPTIMIZERS[kind])
        return model, OPTIMIZERS[kind](model.parameters())

    def step(model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        if zero:
            optimizer.finish_grad_sync()
        optimizer.step()

    (model, optimizer), (other, another) = made(saved, 0), made(loaded, 1)
    step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, grid, {})
    before, options = [each.clone() for each in other.parameters()], inner(another).param_groups[0].copy()
    text = str(raised(ArgumentError, lambda: load_checkpoint(tmp_path, other, another, grid)))
    assert text == f"optimizer of checkpoint {tmp_path}: expected {loaded}, got {saved}"
    assert all(torch.equal(x, y) for x, y in zip(before, other.parameters(), strict=True))
    assert inner(another).param_groups[0] == options
    step(other, another)
    load_checkpoint(tmp_path, *made(saved, 2), grid)


def inner(optimizer):
    return optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
