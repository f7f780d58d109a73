"""Shards of ZeRO in checkpoints: saved and loaded in place, by torch.distributed.checkpoint too, from any layout."""

import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from cases.odd_layers import Odd, adamw, trained
from harness import torch_world
from harness.failures import raised
from harness.live_memory import LiveMemory
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, ShardedOptimizer, ShardSpec, load_checkpoint, save_checkpoint
from ringcomm.parallel.data.zero.checkpoint_parts import part_of
from ringcomm.parallel.grid import Axis


@pytest.mark.parametrize("shape", [(1,), (7,), (4, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_a_range_of_elements_is_a_few_blocks_of_the_tensor(shape):
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for begin, end in product(range(full.numel() + 1), repeat=2):
        if begin < end:
            part = part_of(full.view(-1)[begin:end], begin, full, None, Axis("tp", 1, 0, (0,), None))
            assert placed([part]).tolist() == [x if begin <= x < end else -1.0 for x in range(full.numel())]
            assert len(part.__create_chunk_list__()) <= 2 * len(shape) - 1
            assert all(block.data_ptr() >= full.data_ptr() for _, block in part._blocks)  # no copy


def placed(parts):
    """Return a tensor of parts, flat, with -1 for elements that no part has; fail if two have one."""
    full = torch.full(parts[0].shape, -1.0)
    for part in parts:
        for chunk in part.__create_chunk_list__():
            here = tuple(slice(x, x + size) for x, size in zip(chunk.offsets, chunk.sizes, strict=True))
            assert (full[here] == -1).all()
            full[here] = part.__get_tensor_shard__(dcp.metadata.MetadataIndex("", chunk.offsets))
    return full.view(-1)


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_of_shards_over_tp_are_placed_in_the_full_tensor_without_their_padding(dim):
    full, length = torch.arange(35.0).view(5, 7), -(-(5, 7)[dim] // 2)
    padded = nn.functional.pad(full, (0, dim, 0, 1 - dim), value=99.0)
    parts = []
    for rank in range(2):
        shard = padded.narrow(dim, rank * length, length).reshape(-1)
        whole = torch.empty(*(length if each == dim else full.shape[each] for each in range(2)))
        for begin, end in ((0, 4), (4, 13), (13, len(shard))):
            axis = Axis("tp", 2, rank, (0, 1), None)
            parts.append(part_of(shard[begin:end], begin, whole, ShardSpec(dim, full.shape[dim]), axis))
    assert torch.equal(placed(parts), full.view(-1))


def saved(path, how, dtype):
    """Save after two steps, in a checkpoint of torch; return the full states, and the parameters after two more."""
    grid, model = Grid(dp=dist.get_world_size()), Odd(dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, adamw, dtype, bucket_bytes=3000)
    trained(zero, model, range(2))
    state = zero.state_dict()
    if how == "checkpoint":
        save_checkpoint(path, model, zero, grid, {})
        return state, trained(zero, model, range(2, 4))
    if how == "states":
        if grid.dp.rank == 0:
            torch.save((state, model.frozen.state_dict()), path)
        return state, trained(zero, model, range(2, 4))
    shards = {"zero": zero.state_dict(sharded=True), "frozen": model.frozen.state_dict()}
    if how == "save":
        dcp.save(shards, checkpoint_id=path)
        return state, trained(zero, model, range(2, 4))
    saving = dcp.async_save(shards, checkpoint_id=path)
    after = trained(zero, model, range(2, 4))  # meanwhile
    getattr(saving, "upload_completion", saving).result()
    return state, after


def loaded(path, how, dtype, stepped):
    grid, model = Grid(dp=dist.get_world_size()), Odd(seed=1, dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, adamw, dtype, stage=1)
    if stepped:
        trained(zero, model, range(5, 7))
    if how == "checkpoint":
        load_checkpoint(path, model, zero, grid)
    elif how == "states":
        state, frozen = torch.load(path)
        model.frozen.load_state_dict(frozen)
        if grid.dp.size == 1 and dtype is None:  # the plain optimizer takes and gives them, too
            plain = adamw(model.parameters())
            plain.load_state_dict(state)
            state |= plain.state_dict()
        zero.load_state_dict(state)
    else:
        if not stepped:
            zero.create_states()
        state = {"zero": zero.state_dict(sharded=True), "frozen": model.frozen.state_dict()}
        dcp.load(state, checkpoint_id=path)
        zero.load_state_dict(state["zero"])
    return zero.state_dict(), trained(zero, model, range(2, 4))


@pytest.mark.parametrize("how", ["states", "checkpoint", "save", "async"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_states_are_loaded_by_other_numbers_of_replicas(how, dtype, tmp_path):
    path = tmp_path / "saved"
    state, expected = torch_world.run(saved, 4, path, how, dtype)[0]
    for size, stepped in ((4, False), (2, True), (1, False)):
        for found, after in torch_world.run(loaded, size, path, how, dtype, stepped):
            assert_same(found, state)
            for x, y in zip(after, expected, strict=True) if size == 4 else ():
                assert x == y


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WITHOUT_RINGCOMM = """
import sys
import torch
import torch.distributed.checkpoint as dcp
folder, file = sys.argv[1:]
expected = torch.load(file)
state = {name: torch.zeros_like(x) for name, x in expected.items()}
dcp.load(state, checkpoint_id=folder, no_dist=True)
torch.testing.assert_close(state, expected, rtol=0, atol=0)
assert "ringcomm" not in sys.modules
"""


def test_torch_alone_reads_the_full_tensors_of_shards(tmp_path):
    """Start a process, which takes seconds, as this one has imported ringcomm."""
    state, _ = torch_world.run(saved, 4, tmp_path / "folder", "checkpoint", torch.bfloat16)[0]
    names = dict(enumerate(name for name, _ in Odd().named_parameters()))
    full = {names[number]: x for number, x in state["masters"].items()}
    full |= {f"{names[number]}:{key}": x for number, each in state["state"].items() for key, x in each.items()}
    torch.save(full, tmp_path / "expected")
    program = [sys.executable, "-c", WITHOUT_RINGCOMM, tmp_path / "folder", tmp_path / "expected"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # which would import the backend
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(full) > 20


LAYERS, WIDTH = 16, 512
PARAMETERS = LAYERS * WIDTH * WIDTH
PLANS = 1 << 17  # bytes of the pickled plans
BUCKET = 2 * WIDTH * WIDTH  # bytes of a layer in 16 bits; its masters, of all replicas, have twice as many


@pytest.mark.parametrize("how", ["checkpoint", "torch"])
@torch_world.on(2, 4)
def test_saving_and_loading_take_a_bucket_more_than_what_is_held(how, tmp_path):
    grid = Grid(dp=dist.get_world_size())
    with LiveMemory() as memory:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        factory = partial(torch.optim.AdamW, lr=1e-3)
        zero = ShardedOptimizer(model, grid, factory, torch.bfloat16, bucket_bytes=BUCKET)
        for _ in range(2):
            model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().sum().backward()
            zero.finish_grad_sync()
            zero.step()
        held, peaks = memory.bytes, []
        for save in (True, False):
            memory.peak = 0
            if how == "checkpoint":
                save_checkpoint(tmp_path, model, zero, grid, {}) if save else load_checkpoint(
                    tmp_path, model, zero, grid
                )
            else:
                state = zero.state_dict(sharded=True)
                (dcp.save if save else dcp.load)(state, checkpoint_id=tmp_path)
                zero.load_state_dict(state)
                del state
            peaks.append(memory.peak)
        assert memory.bytes == held
    per_parameter = [round(each / PARAMETERS, 2) for each in (held, *peaks)]
    assert max(peaks) <= held + 2 * BUCKET + PLANS, per_parameter


@torch_world.on(2)
@torch_world.each("dtype", [None, torch.bfloat16])
def test_a_copy_of_a_sharded_state_restores_parameters_masters_states_and_options(dtype):
    grid, model = Grid(dp=2), Odd(dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, adamw, dtype)
    trained(zero, model, range(2))
    copied, expected = deepcopy(zero.state_dict(sharded=True)), deepcopy((zero.state_dict(), model.state_dict()))
    zero.optimizer.param_groups[0]["lr"] = 0.5
    trained(zero, model, range(2, 4))
    zero.load_state_dict(copied)
    assert_same((zero.state_dict(), model.state_dict()), expected)
    after = trained(zero, model, range(2, 4))
    zero.load_state_dict(copied)  # which training has not changed
    assert_same((zero.state_dict(), model.state_dict()), expected)
    assert trained(zero, model, range(2, 4)) == after


@torch_world.on(2)
@torch_world.each("dtype", [None, torch.bfloat16])
def test_creating_states_leaves_parameters_and_masters_as_they_are(dtype):
    grid, model = Grid(dp=2), Odd(dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, partial(torch.optim.AdamW, lr=0.5, weight_decay=0.9), dtype)
    before = deepcopy((zero.state_dict()["masters"], model.state_dict()))
    zero.create_states()
    zero.update_parameters()
    assert len(zero.state_dict()["state"]) == len(before[0]) > 5
    assert_same((zero.state_dict()["masters"], model.state_dict()), before)


@torch_world.on(2)
def test_sharded_states_that_the_object_does_not_have_are_refused_and_change_nothing():
    grid = Grid(dp=2)
    zero, other, wider = (ShardedOptimizer(nn.Linear(4, size), grid, adamw) for size in (4, 4, 8))
    for each in (other, wider):
        each.create_states()
    before = zero.state_dict()
    text = str(raised(ArgumentError, lambda: zero.load_state_dict(other.state_dict(sharded=True))))
    assert "states: expected those that this object has, after create_states or a step, got exp_avg of " in text
    zero.create_states()
    text = str(raised(ArgumentError, lambda: zero.load_state_dict(wider.state_dict(sharded=True))))
    assert re.search(r"\w+ of \w+: expected part of \((4, )?4,?\): .* got part of \(8,", text), text
    for groups in ([], [{}, {}]):
        raised(ArgumentError, lambda groups=groups: zero.load_state_dict({**before, "param_groups": groups}))
    assert_same(zero.state_dict()["masters"], before["masters"])


@torch_world.on(2)
def test_states_of_another_object_are_refused():
    grid = Grid(dp=2)
    zero, other = (ShardedOptimizer(nn.Linear(*size), grid, adamw) for size in ((4, 4), (5, 4)))
    named = ShardedOptimizer(nn.Sequential(nn.Linear(4, 4)), grid, adamw)
    raised(ArgumentError, lambda: zero.load_state_dict(named.state_dict(sharded=True)))
    assert other.state_dict(sharded=True)["masters"].keys() <= {"weight", "bias"}
    with pytest.raises(TypeError, match="on a part of a tensor, which is only saved and loaded"):
        next(iter(zero.state_dict(sharded=True)["masters"].values())).sum()
