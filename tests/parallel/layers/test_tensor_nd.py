"""Tensor parallelism in 2, 2.5 and 3 dimensions compared with one process, in float64, and its bytes."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid
from ringcomm.parallel.tensor.multidimensional import GridAttention, GridLinear, GridMLP, TensorGrid
from ringcomm.torch.traffic import bytes_sent, record_traffic

B, S, H, HEADS = 8, 3, 8, 4

# Name, number of ranks, depth, whether a cube.
GRIDS = {"1": (1, 1, False), "2-D": (4, 1, False), "2.5-D": (8, 2, False), "3-D": (8, 2, True), "depth": (2, 2, False)}


def grid_of(name):
    size, depth, cube = GRIDS[name]
    return TensorGrid(Grid(dp=dist.get_world_size() // size, tp=size).tp, 1 if cube else depth, cube=cube)


def drawn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12), float((got - expected).abs().max())


# --- Layers of one process --------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H, bias), nn.Linear(4 * H, H, bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.query_key_value, self.out = nn.Linear(H, 3 * H, bias), nn.Linear(H, H, bias)

    def forward(self, x):
        query, key, value = self.query_key_value(x).view(B, S, HEADS, 3, H // HEADS).permute(3, 0, 2, 1, 4)
        scores = query @ key.mT / (H // HEADS) ** 0.5
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


LAYERS = {
    "linear": (lambda bias: nn.Linear(H, 2 * H, bias), lambda grid, bias: GridLinear(H, 2 * H, grid, bias=bias)),
    "MLP": (MLP, lambda grid, bias: GridMLP(H, 4 * H, grid, bias=bias)),
    "attention": (Attention, lambda grid, bias: GridAttention(H, HEADS, grid, bias=bias)),
}


def equal_one_process(grid_name, kind, bias):
    torch.set_default_dtype(torch.float64)
    try:
        plain, sharded = LAYERS[kind]
        torch.manual_seed(1)
        whole = plain(bias)
        torch.manual_seed(1)
        with grid_of(grid_name) as grid:
            mine = sharded(grid, bias)
            x, x_mine = (drawn(B, S, H, seed=2).requires_grad_() for _ in range(2))
            expected = whole(x)
            block = grid.split(x_mine)
            q, d = grid.q, grid.depth.size
            assert block.shape == (B // (d * q), S, H // q)
            out = mine(block)
            assert out.numel() == expected.numel() // (d * q * q)
            y = grid.join(out, turned=grid.cube and kind == "linear")
            close(y, expected)
            grad = drawn(*y.shape, seed=3)
            expected.backward(grad)
            y.backward(grad)
            close(x_mine.grad, x.grad)
            linears = {name: layer for name, layer in mine.named_modules() if isinstance(layer, GridLinear)}
            for name, layer in linears.items():
                theirs = whole.get_submodule(name)
                assert layer.weight.numel() == theirs.weight.numel() // (q * d * q if grid.cube else q * q)
                close(layer.full(layer.weight.detach()), theirs.weight)
                close(layer.full(layer.weight.grad), theirs.weight.grad)
                if bias:
                    assert layer.bias.numel() == theirs.bias.numel() // q
                    close(layer.full(layer.bias.detach()), theirs.bias)
                    close(layer.full(layer.bias.grad), theirs.bias.grad)
    finally:
        torch.set_default_dtype(torch.float32)


def all_equal_one_process(grid_name):
    torch_world.each("kind", LAYERS)(equal_one_process)(grid_name, True)


@pytest.mark.parametrize("grid", GRIDS)
def test_layers_equal_those_of_one_process_with_all_gradients(grid):
    torch_world.run(all_equal_one_process, GRIDS[grid][0], grid)


@pytest.mark.parametrize(("grid", "backend"), [("2-D", "ringcomm"), ("3-D", "ringcomm"), ("2-D", "gloo")])
def test_layers_without_a_bias_equal_those_of_one_process(grid, backend):
    torch_world.run(equal_one_process, GRIDS[grid][0], grid, "MLP", False, backend=backend)


def test_several_grids_share_a_world():
    """Two replicas of a 2-D grid: each creates only its own groups."""
    torch_world.run(equal_one_process, 8, "2-D", "attention", True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", GRIDS)
def test_layers_equal_those_of_one_process_on_gloo(grid):
    torch_world.run(all_equal_one_process, GRIDS[grid][0], grid, backend="gloo")


# --- Bytes ------------------------------------------------------------------------------------------------------------


def counted(module, x, grid):
    """Return the elements this rank sends forward and backward."""
    axes = {axis.group.group_name: axis for axis in (grid.row, grid.column, grid.depth) if axis.size > 1}.values()
    with record_traffic() as forward:
        y = module(x)
    with record_traffic() as backward:
        y.sum().backward()
    return [sum(bytes_sent(calls, axis.group) for axis in axes) / 8 for calls in (forward, backward)]


def sent(grid_name):
    """Return the elements a linear layer and a transformer layer send."""
    with grid_of(grid_name) as grid:
        torch.set_default_dtype(torch.float64)
        try:
            x = grid.split(drawn(B, S, H, seed=2)).requires_grad_()
            linear = counted(GridLinear(H, 2 * H, grid, bias=False), x, grid)
            both = nn.Sequential(GridAttention(H, HEADS, grid, bias=False), GridMLP(H, 4 * H, grid, bias=False))
            layer = counted(both, x, grid)
            with_bias = counted(GridLinear(H, 2 * H, grid), x, grid)
            frozen = counted(GridLinear(H, 2 * H, grid, bias=False).requires_grad_(False), x, grid)
            return linear, layer, with_bias, frozen
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("grid", "q", "d"), [("2-D", 2, 1), ("2.5-D", 2, 2), ("depth", 1, 2)])
def test_2_d_and_2_5_d_send_the_elements_of_the_papers(grid, q, d):
    ours = Fraction(q - 1, q * q)  # one all-gather; broadcasts along trees: log q / q
    inputs, weight, state = B * S * H, H * 2 * H, H * H
    copies = Fraction(2 * (d - 1), d * q * q)
    bias = sum(Fraction(2 * (n - 1), n) for n in (q, d)) * Fraction(2 * H, q)
    for linear, layer, with_bias, frozen in torch_world.run(sent, GRIDS[grid][0], grid):
        forward = ours * (Fraction(inputs, d) + weight)
        assert linear == [forward, 2 * forward + copies * weight]
        assert with_bias == [forward, 2 * forward + copies * weight + bias]
        optimus = ours * (Fraction(7 * inputs, d) + 12 * state)
        assert layer == [optimus, 2 * optimus + copies * 12 * state]
        assert frozen == [forward, forward]


def test_3_d_sends_the_elements_of_the_docstring():
    q = 2
    ours = Fraction(q - 1, q**3)
    inputs, outputs, weight, state = B * S * H, B * S * 2 * H, H * 2 * H, H * H
    bias = 2 * Fraction(2 * (q - 1), q) * Fraction(2 * H, q)
    for linear, layer, with_bias, frozen in torch_world.run(sent, 8, "3-D"):
        forward, backward = ours * (inputs + weight + outputs), ours * (2 * inputs + 2 * weight + outputs)
        assert linear == [forward, backward]
        assert with_bias == [forward, backward + bias]
        assert layer == [ours * (16 * inputs + 12 * state), ours * ((14 + 9) * inputs + 24 * state)]
        assert frozen == [forward, ours * (inputs + weight + outputs)]


# --- Memory, types and errors -----------------------------------------------------------------------------------------


@torch_world.on(4)
def test_a_linear_layer_saves_its_blocks_only():
    with grid_of("2-D") as grid:
        layer = GridLinear(H, 2 * H, grid)
        x = grid.split(torch.randn(B, S, H)).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape), lambda x: x):
            layer(x)
    assert saved == [(B // 2, S, H // 2), (H, H // 2)]


@torch_world.on(4)
def test_layers_run_under_autocast():
    with grid_of("2-D") as grid:
        mlp = GridMLP(H, 4 * H, grid)
        x = grid.split(torch.randn(B, S, H)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert {each.grad.dtype for each in (x, *mlp.parameters())} == {torch.float32}
        expected = torch.autograd.grad(mlp(x).sum(), x)[0]
        assert torch.allclose(x.grad, expected, atol=0.02)


@torch_world.on(4)
def test_sizes_that_cannot_be_divided_are_refused_and_the_grid_works_on():
    axis = Grid(tp=4).tp
    with TensorGrid(axis) as grid:
        linear = GridLinear(H, H, grid)
        x = torch.randn(B // 2, S, H // 2)
        for make, words in (
            (lambda: TensorGrid(axis, 2), "size of tp: expected depth 2 · a square, got 4"),
            (lambda: TensorGrid(axis, cube=True), "size of tp: expected a cube, 1, 8, 27 …, got 4"),
            (lambda: TensorGrid(axis, 0), "depth: expected an integer from 1"),
            (lambda: GridLinear(5, 4, grid), "in_features: expected a multiple of 2, for q = 2, got 5"),
            (lambda: GridLinear(4, 5, grid), "out_features: expected a multiple of 2, for q = 2, got 5"),
            (lambda: GridAttention(9, 3, grid), "heads: expected a multiple of q = 2 and a divisor .*, 9, got 3"),
            (lambda: GridAttention(10, 4, grid), "heads: expected a multiple of q = 2 and a divisor .*, 10, got 4"),
            (lambda: linear(torch.randn(B, S, H)), "features of the input: expected 8 / 2, got 8"),
            (lambda: grid.split(torch.randn(3, S, H)), "dimension 0 of .*: expected a multiple of column = 2, got 3"),
        ):
            with pytest.raises(ArgumentError, match=words):
                make()
        linear(x).sum().backward()
    grid.close()
