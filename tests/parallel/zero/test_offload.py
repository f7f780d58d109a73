"""Optimizer states off the device: the same bits as on it, and no more memory than two chunks."""

import copy
import os
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_activations import largest_file
from torch import nn

import harness
from cases.odd_layers import Odd, adamw, loss_of, same, stages
from harness import torch_world
from harness.live_memory import LiveMemory
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, ShardedOptimizer, load_checkpoint, save_checkpoint
from ringcomm.parallel.state import offload
from ringcomm.parallel.state.offload import OffloadedOptimizer

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": adamw,
    "adamw, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),  # has states before its first step
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}
ALONE = type("Axis", (), {"size": 1, "rank": 0})


def step(model, optimizer, number):
    """Train on a batch; those of even numbers leave a layer unused."""
    optimizer.zero_grad()
    loss_of(model, number, ALONE, model.scale.dtype, some=number % 2 == 1).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def same_states(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for key, x in state.items():
            y = found["state"][number][key]
            assert type(x) is type(y)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("moved", "in_files"), [(False, False), (True, True)], ids=["states in memory", "states and parameters in files"]
)
def test_parameters_and_states_have_the_bits_of_the_optimizer_alone(kind, moved, in_files, tmp_path):
    # A parameter is in several chunks, and one in two; all are in one; for a fused kernel also the smallest ones.
    for chunk_bytes in (1500, 1 << 20, *([1] if kind == "adamw, fused" else [])):
        model, other = Odd(dtype=torch.float32), Odd(dtype=torch.float32)
        optimizer = OffloadedOptimizer(
            model.parameters(), OPTIMIZERS[kind], folder=tmp_path if in_files else None, chunk_bytes=chunk_bytes
        )
        if moved:
            optimizer.offload_parameters()
        plain = OPTIMIZERS[kind](other.parameters())
        for number in range(4):
            step(model, optimizer, number)
            step(other, plain, number)
            same(model, other)
        same_states(optimizer.state_dict(), plain.state_dict())


def test_groups_keep_their_options_and_schedules_of_torch_change_them():
    def grouped(parameters):
        wide = [each for each in parameters if each.dim() > 1]
        rest = [each for each in parameters if each.dim() <= 1]
        return torch.optim.AdamW([{"params": wide, "weight_decay": 0.5}, {"params": rest, "lr": 0.1}], lr=0.01)

    model, other = Odd(), Odd()
    optimizers = OffloadedOptimizer(list(model.parameters()), grouped, chunk_bytes=1500), grouped([*other.parameters()])
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    for number in range(3):
        for each, optimizer, schedule in zip((model, other), optimizers, schedules, strict=True):
            step(each, optimizer, number)
            schedule.step()
        same(model, other)
    same_states(optimizers[0].state_dict(), optimizers[1].state_dict())
    for each, optimizer in zip((model, other), optimizers, strict=True):
        each.late = nn.Linear(3, 3)
        optimizer.add_param_group({"params": each.late.weight})
        each.late.weight.data.fill_(1.0)
        each.late.weight.grad = torch.ones(3, 3)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.late.weight, other.late.weight)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "adamw, fused", "adagrad", "asgd"])
def test_states_are_loaded_from_and_by_the_optimizer_alone(kind, tmp_path):
    model, other = Odd(dtype=torch.float32), Odd(dtype=torch.float32)
    optimizer = OffloadedOptimizer(model.parameters(), OPTIMIZERS[kind], folder=tmp_path, chunk_bytes=1500)
    plain = OPTIMIZERS[kind](other.parameters())
    step(model, optimizer, 1)
    step(other, plain, 1)
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    same_states(optimizer.state_dict(), expected)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(2, 4):
        step(model, optimizer, number)
        step(other, plain, number)
        same(model, other)
    same_states(optimizer.state_dict(), plain.state_dict())


def test_steps_after_a_load_do_not_change_the_states_that_were_saved_before():
    model = Odd()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    step(model, optimizer, 1)
    saved = optimizer.state_dict()
    expected = copy.deepcopy(saved)
    optimizer.load_state_dict({**saved, "state": {}})
    step(model, optimizer, 2)
    same_states(saved, expected)


# --- Memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def immediately(_device):
    """Do at once, in this thread, what the other thread does in the same order."""

    def submit(function, *args):
        future = Future()
        future.set_result(function(*args))
        return future

    yield submit


@pytest.mark.parametrize(("moved", "states"), [(False, 2), (True, 3)])  # of AdamW: moments, and masters
def test_a_step_takes_the_memory_of_two_chunks_and_none_remains(moved, states, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "_background", immediately)
    size, chunk = 1 << 16, 1 << 14  # bytes; AdamW allocates two tensors to update one
    with LiveMemory() as memory:
        parameters = [nn.Parameter(torch.ones(size // 4)) for _ in range(4)]
        optimizer = OffloadedOptimizer(parameters, adamw, folder=tmp_path, chunk_bytes=chunk)
        if moved:
            optimizer.offload_parameters()
        for parameter in parameters:
            parameter.grad = torch.ones(size // 4)
        before = memory.bytes
        assert before == 4 * size * (1 if moved else 2)
        for _ in range(3):
            memory.peak = 0
            optimizer.step()
            assert memory.bytes - before < 1000  # the numbers of steps
            assert memory.file_bytes == 4 * size * states
            assert memory.peak - before < (2 * states + 2) * chunk + 1000
        assert memory.peak - before >= 2 * states * chunk
        assert os.listdir(tmp_path) == []
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        del optimizer, parameters, parameter
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert memory.file_bytes == 0


def releasing(function, semaphore):
    def call(*args):
        result = function(*args)
        semaphore.release()
        return result

    return call


def test_the_next_chunk_is_read_and_the_one_before_written_while_one_is_updated(tmp_path, monkeypatch):
    """Let each update wait until the other thread has done both."""
    numbers, read, written = count(), threading.Semaphore(0), threading.Semaphore(0)

    class Waiting(torch.optim.SGD):
        pass

    def step(optimizer):
        chunk = next(numbers)
        for done, times in ((read, 2 if chunk == 0 else 1), (written, 0 if chunk == 0 else 1)):
            for _ in range(times):
                assert done.acquire(timeout=harness.OPERATION), f"chunk {chunk}"
        torch.optim.SGD.step(optimizer)

    for owner, name, done in ((OffloadedOptimizer, "_read", read), (offload, "_copy", written)):
        monkeypatch.setattr(owner, name, releasing(getattr(owner, name), done))
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = OffloadedOptimizer(
        [parameter], partial(Waiting, lr=0.5, momentum=0.9), folder=tmp_path, chunk_bytes=1024
    )
    monkeypatch.setattr(Waiting, "step", step)  # once the constructor has tried the optimizer
    optimizer.step()
    assert next(numbers) == 4
    assert torch.equal(parameter, torch.full((1000,), 0.5))


# --- With masters, and on shares --------------------------------------------------------------------------------------


@torch_world.on(1, 2)
@stages
@torch_world.each("dtype", [None, torch.float16])
def test_zero_gives_the_same_bits_and_states(stage, dtype, tmp_path):
    grid = Grid(dp=dist.get_world_size())
    start = torch.float64 if dtype is None else torch.float32
    model, other = Odd(grid.dp.rank, start), Odd(grid.dp.rank, start)
    offloaded = partial(OffloadedOptimizer, factory=adamw, folder=tmp_path, chunk_bytes=1500)
    zeros = [
        ShardedOptimizer(each, grid, optimizer, dtype, stage=stage, bucket_bytes=3000, init_scale=256.0)
        for each, optimizer in ((model, offloaded), (other, adamw))
    ]
    for number in range(4):
        for each, zero in zip((model, other), zeros, strict=True):
            (loss_of(each, number, grid.dp, dtype or start, some=number % 2 == 1) * zero.loss_scale).backward()
            zero.finish_grad_sync()
            norm = zero.step(max_norm=0.1)
            assert norm is not None
        same(model, other)
        if number == 1:
            zeros[0].load_state_dict(zeros[1].state_dict())
    states = [zero.state_dict() for zero in zeros]
    same_states(*states)
    for number, master in states[1]["masters"].items():
        assert torch.equal(states[0]["masters"][number], master)


@torch_world.on(2)
@torch_world.each("dtype", [torch.float32, torch.float16])
def test_mixed_precision_gives_the_same_bits_and_its_checkpoints_are_loaded(dtype, tmp_path):
    grid = Grid(dp=2)
    folder = tmp_path / str(grid.dp.rank)
    folder.mkdir(exist_ok=True)
    factory = partial(OffloadedOptimizer, factory=adamw, folder=folder, chunk_bytes=1500)
    model, other, third = (Odd(seed, torch.float32) for seed in (0, 0, 1))
    offloaded, plain, loaded = (
        MixedPrecision(each, grid, optimizer, dtype, init_scale=256.0)
        for each, optimizer in ((model, factory), (other, adamw), (third, factory))
    )
    sync = [DataParallel(each, grid.dp) for each in (model, other)]
    for number in range(3):
        for each, mixed, replicas in zip((model, other), (offloaded, plain), sync, strict=True):
            (loss_of(each, number, grid.dp, dtype, some=True) * mixed.loss_scale).backward()
            replicas.finish_grad_sync()
            assert mixed.step(max_norm=0.1) is not None
            mixed.zero_grad()
        same(model, other)
    same_states(offloaded.optimizer.state_dict(), plain.optimizer.state_dict())
    path = tmp_path / f"checkpoint of {dtype}"
    save_checkpoint(path, model, offloaded, grid, {"step": 3})
    assert load_checkpoint(path, third, loaded, grid) == {"step": 3}
    same(third, other)
    for x, y in zip(loaded.masters, plain.masters, strict=True):
        assert torch.equal(x, y)
    state = loaded.optimizer.state_dict()
    state["state"] = {number: each for number, each in state["state"].items() if each}  # frozen ones are empty
    same_states(state, plain.optimizer.state_dict())


@torch_world.on(2)
@torch_world.each("stage", [0, 1, 2])
def test_masters_of_16_bits_are_off_the_device_too(stage, tmp_path):
    grid = Grid(dp=dist.get_world_size())
    factory = partial(OffloadedOptimizer, factory=adamw, folder=tmp_path, chunk_bytes=5000)
    size, layers = 64 * 64, 4
    with LiveMemory() as memory:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
        if stage:
            zero = ShardedOptimizer(model, grid, factory, torch.bfloat16, stage=stage, bucket_bytes=2 * size)
        else:
            zero = MixedPrecision(model, grid, factory, torch.bfloat16)
        for _ in range(2):
            model(torch.ones(2, 64, dtype=torch.bfloat16)).square().sum().backward()
            if stage:
                zero.finish_grad_sync()
            assert zero.step(max_norm=1.0)
            zero.zero_grad()
            gradients = {0: 0, 1: layers, 2: 2}[stage]  # buffers that remain
            assert memory.bytes - 2 * size * (layers + gradients) < 1000
            assert memory.file_bytes == 12 * layers * size / (grid.dp.size if stage else 1)


# --- Refusals and failures --------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused(tmp_path):
    parameters = [nn.Parameter(torch.ones(3, 4))]
    for options, text in (
        ({"chunk_bytes": 0}, "chunk_bytes: expected an integer from 1 to .*, got 0"),
        ({"folder": tmp_path / "none"}, r"folder: expected one that exists, got .*/none$"),
    ):
        with pytest.raises(ArgumentError, match=text):
            OffloadedOptimizer(parameters, adamw, **options)
    strided = nn.Parameter(torch.ones(3, 4).t())
    with pytest.raises(ArgumentError, match=r"parameters: expected contiguous ones, got one of strides \(1, 4\)"):
        OffloadedOptimizer([strided], adamw)


def test_states_of_another_shape_are_refused_and_change_nothing():
    model, other = Odd(), Odd()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    step(model, optimizer, 1)
    wrong = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(wrong)
    wrong["state"][0]["exp_avg"] += 1
    wrong["state"][2]["exp_avg_sq"] = torch.ones(3)
    wrong["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ArgumentError, match=r"shape of the state exp_avg_sq: expected \(33,\), got \(3,\)"):
        optimizer.load_state_dict(wrong)
    same_states(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(adamw([other.scale]).state_dict())
    same_states(optimizer.state_dict(), before)


def test_an_error_in_a_step_is_raised_and_no_thread_remains(tmp_path):
    parameter = nn.Parameter(torch.ones(5000))
    parameter.grad = torch.ones(5000)
    optimizer = OffloadedOptimizer([parameter], adamw, folder=tmp_path, chunk_bytes=1024)
    threads = threading.active_count()
    with largest_file(10_000), pytest.raises(ArgumentError, match="folder: expected one with room for 20,000 bytes"):
        optimizer.step()
    assert threading.active_count() == threads
    optimizer.step()
    parameter.grad = torch.ones(5000).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert threading.active_count() == threads


@torch_world.on(2)
def test_a_folder_that_one_rank_lacks_is_refused_on_all_and_the_group_is_usable(tmp_path):
    grid, model = Grid(dp=2), Odd()
    factory = partial(OffloadedOptimizer, factory=adamw, folder=tmp_path / ("none" if grid.dp.rank else ""))
    with pytest.raises(ArgumentError, match=r"folder: expected one that exists"):
        ShardedOptimizer(model, grid, factory)
    ShardedOptimizer(model, grid, adamw)
