"""Activations shared by ranks, off the device or recomputed: the same bits, and the bytes of the formulas."""

import os
import resource
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from cases.small_gpt import compared, config_for
from harness import torch_world
from harness.live_memory import LiveMemory
from ringcomm import ArgumentError
from ringcomm.parallel import GPTConfig, Grid, seed_ranks
from ringcomm.parallel.collectives import local_slice
from ringcomm.parallel.model.activations import offload_activations, sharded_checkpoint
from ringcomm.parallel.model.gpt import GPTStage
from ringcomm.torch.traffic import bytes_sent, record_traffic

B, S, H, HEADS = 8, 16, 32, 8  # activations of a rank have at least 4 KiB
LAYERS = 3
STATISTICS = 2 * B * S * 4 * 2  # bytes: mean and deviation of each token in the two norms of a layer


def layers(grid, **options):
    """Return layers of a GPT with dropout, and an input: the same on all ranks, or each rank's tokens of it."""
    config = GPTConfig(64, S, LAYERS, H, HEADS, dropout=0.1, **options)
    seed_ranks(grid, 0)
    stage = GPTStage(config, grid, range(LAYERS), first=False, last=False)
    x = torch.randn(B, S, H)
    return stage, (local_slice(x, grid.tp, 1) if config.sequence_parallel else x).requires_grad_()


def trained(grid, folder=None, **options):
    """Return the output of layers and all gradients, after a forward with other random numbers than their weights."""
    stage, x = layers(grid, **options)
    with offload_activations(folder) if folder else nullcontext():
        y = stage(x)
    torch.randn(3)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in stage.parameters())]


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
def test_values_and_gradients_have_the_same_bits_in_every_mode_with_dropout(tmp_path):
    grid = Grid(tp=dist.get_world_size())
    expected = trained(grid)
    for recompute in (False, "full", "sharded", "selective"):
        for folder in (None, tmp_path):
            for x, y in zip(trained(grid, folder, recompute=recompute), expected, strict=True):
                assert torch.equal(x, y)


def kept(grid, folder=None, **options):
    """Return the bytes that a forward of the layers leaves for backward: in memory, and in files."""
    with LiveMemory() as memory:
        stage, x = layers(grid, **options)
        before = memory.bytes
        with offload_activations(folder) if folder else nullcontext():
            y = stage(x)
        found = memory.bytes - before - y.nbytes + x.nbytes, memory.file_bytes
        y.sum().backward()
        assert memory.file_bytes == 0
    return found


@torch_world.on(1, 2, 4)
def test_activations_take_the_bytes_of_the_formulas(tmp_path):
    """Count the elements that Korthikanti et al. count; torch's masks on a CPU are elements, not bytes."""
    grid = Grid(tp=dist.get_world_size())
    t, x, scores = grid.tp.size, 4 * B * S * H, 4 * B * HEADS * S * S
    whole = x * (6 + 12 / t) + STATISTICS  # inputs of norms and of branches, masks; q, k, v, 2 · 4 in the MLP, 1
    assert kept(grid) == (LAYERS * (whole + 3 * scores / t), 0)
    assert kept(grid, recompute="selective") == (LAYERS * whole, 0)
    split = x * (2 + 16 / t) + STATISTICS / t  # the inputs of q, k, v and of the MLP are whole
    assert kept(grid, recompute="selective", sequence_parallel=True) == (LAYERS * split, 0)
    assert kept(grid, recompute="full") == (LAYERS * x, 0)
    assert kept(grid, recompute="sharded") == (
        LAYERS * x / t + (t > 1) * x,
        0,
    )  # and the input of the first, the user's
    assert kept(grid, tmp_path, recompute="full") == (x, LAYERS * x)
    assert kept(grid, tmp_path, recompute="sharded") == (x, LAYERS * x / t)


@torch_world.on(2, 4)
def test_backward_gathers_the_input_of_each_block_once():
    grid = Grid(tp=dist.get_world_size())
    sent, calls = {}, {}
    for recompute in ("full", "sharded"):
        stage, x = layers(grid, recompute=recompute)
        y = stage(x)
        with record_traffic() as calls[recompute]:
            y.sum().backward()
        sent[recompute] = bytes_sent(calls[recompute], grid.tp.group)
    assert sent["sharded"] - sent["full"] == LAYERS * x.nbytes * (grid.tp.size - 1) / grid.tp.size
    assert [call.operation for call in calls["sharded"]].count("all_gather") == LAYERS


@pytest.mark.parametrize("recompute", ["sharded", "selective"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2)], ids=str)
def test_a_gpt_that_recomputes_trains_as_one_process(layout, recompute):
    torch_world.run(compared, layout[1] * layout[2], *layout, "1f1b", {"recompute": recompute}, 2, torch.float64, 1e-10)


@torch_world.on(2)
def test_a_sharded_checkpoint_takes_inputs_of_any_shape_and_backward_twice():
    grid = Grid(tp=2)
    weight = torch.randn(5, 5, dtype=torch.float64)
    for x in (torch.ones(2, 3, 5).transpose(0, 1), torch.ones(0, 5), torch.ones(4, 5).requires_grad_()):
        x = x.double().detach().requires_grad_(x.requires_grad)
        given, expected = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        y = sharded_checkpoint(lambda x, given=given: (x @ given).sin(), x, grid.tp)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        grad, x.grad = x.grad, None
        for _ in range(2):
            (x @ expected).sin().sum().backward()
        torch.testing.assert_close(given.grad, expected.grad, rtol=1e-14, atol=1e-14)
        assert (grad is None) is (x.grad is None)
        assert grad is None or torch.equal(grad, x.grad)
    with torch.no_grad():
        assert torch.equal(sharded_checkpoint(torch.sin, x, grid.tp), x.sin())


# --- Off the device ---------------------------------------------------------------------------------------------------


def test_tensors_move_to_files_without_names_except_weights_and_small_ones(tmp_path):
    """Count the saved tensors through hooks, and compare with the bytes of the files."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    weights = {each.data_ptr() for each in model.parameters()}
    x, saved = torch.randn(64, 64, requires_grad=True), []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(x)
    moved = [each.nbytes for each in saved if each.data_ptr() not in weights and each.nbytes >= 4096]
    assert moved == [4 * 64 * width for width in (64, 128, 128, 128)]
    with LiveMemory() as memory:
        with offload_activations(tmp_path):
            y = model(x)
        assert memory.file_bytes == sum(moved)
        assert os.listdir(tmp_path) == []
        assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == len(moved)
        y.sum().backward()
        assert memory.file_bytes == 0


def test_tensors_come_back_with_their_values_and_strides(tmp_path):
    found = []
    with offload_activations(tmp_path):
        for x in (
            torch.randn(64, 32),
            torch.randn(32, 64).t(),
            torch.randn(8, 16, 4, 8).permute(0, 2, 1, 3)[:, :2],
            torch.arange(2048),
            torch.rand(5000) > 0.5,
            torch.ones(1, 2048, dtype=torch.bfloat16).expand(3, 2048),
        ):
            node = Keep.apply(torch.ones((), requires_grad=True), x).grad_fn
            found.append((x, *node.saved_tensors))
    for x, back in found:
        assert back.dtype == x.dtype
        assert back.stride() == torch.empty_like(x).stride()
        assert torch.equal(back, x)
        assert back.untyped_storage().filename


class Keep(torch.autograd.Function):
    """Saves a tensor for backward."""

    @staticmethod
    def forward(ctx, one, x):
        ctx.save_for_backward(x)
        return one.clone()


def test_without_a_folder_tensors_of_a_cpu_stay():
    with LiveMemory() as memory:
        x = torch.randn(64, 64, requires_grad=True)
        with offload_activations():
            y = x.sin()
        assert memory.bytes == x.nbytes + y.nbytes
        assert memory.file_bytes == 0


# --- Refusals ---------------------------------------------------------------------------------------------------------


@torch_world.on(2)
def test_an_input_that_cannot_be_shared_is_refused_on_all_ranks():
    grid = Grid(tp=2)
    with pytest.raises(ArgumentError, match="number of elements of the input: expected a multiple of tp = 2, got 15"):
        sharded_checkpoint(torch.sin, torch.ones(3, 5), grid.tp)
    x = torch.ones(2, requires_grad=True)
    sharded_checkpoint(torch.sin, x, grid.tp).sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_other_kinds_of_recomputation_are_refused():
    assert config_for(1, 1, recompute=True).recompute is True
    with pytest.raises(ArgumentError, match="unknown recompute 'ful'; did you mean 'full'"):
        config_for(1, 1, recompute="ful")
    with pytest.raises(ArgumentError, match="recompute with sequence_parallel: expected 'full' or 'selective', got"):
        config_for(2, 1, recompute="sharded", sequence_parallel=True)


@contextmanager
def largest_file(size):
    """Let no file be larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_is_missing_or_full_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"folder: expected one that exists, got .*/none$"):
        offload_activations(tmp_path / "none")
    x = torch.ones(5000, requires_grad=True)
    with (
        largest_file(10_000),
        pytest.raises(ArgumentError, match=r"room for 20,000 bytes, got .* \(.*File too large"),
        offload_activations(tmp_path),
    ):
        x.sin()
