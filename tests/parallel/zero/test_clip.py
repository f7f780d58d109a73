"""Gradient norm and clipping on every layout equal those of one process."""

import math

import pytest
import torch
from torch import nn

from cases.small_gpt import config_for, layouts
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, clip_grad_norm, gpt_stages, grad_norm, make_schedule
from ringcomm.parallel.model.verify import full_values
from ringcomm.parallel.sharding import collect_shard_specs, full_shape, shard_of
from ringcomm.parallel.state.seed import derive_seed


def give_gradients(chunks, tp):
    """Set gradients seeded by name: shards of the same full ones on every layout."""
    for chunk in chunks:
        found = collect_shard_specs(chunk)
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(derive_seed(name))
            full = torch.randn(full_shape(parameter, found.get(name)), dtype=torch.float64, generator=generator)
            parameter.grad = (shard_of(full, found[name], tp) if name in found else full).to(parameter.dtype)


def clipped(dp, tp, pp, tied):
    grid, alone = Grid(dp, tp, pp), Grid.alone()
    config = config_for(tp, pp, tied=tied, sequence_parallel=True)
    chunks = [chunk.double() for chunk in gpt_stages(config, grid, make_schedule("interleaved", pp, pp, 2))]
    whole = [chunk.double() for chunk in gpt_stages(config, alone)]
    for each, axis in ((chunks, grid.tp), (whole, alone.tp)):
        give_gradients(each, axis)
    for most in (1e9, 3.0, 0.1):
        expected = nn.utils.clip_grad_norm_(whole[0].parameters(), most)
        norm = clip_grad_norm(chunks, grid, most)
        assert math.isclose(norm, expected, rel_tol=1e-12)
        one = full_values("gradient", whole, alone)
        for name, grad in full_values("gradient", chunks, grid).items():
            torch.testing.assert_close(grad, one[name], rtol=1e-12, atol=0)
    return float(grad_norm(chunks, grid))


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "tied"),
    [
        *((*layout, True) for size in (1, 2, 4) for layout in layouts(size)),
        *((1, 2, 2, False), (2, 2, 2, False)),
        *(pytest.param(*layout, True, marks=pytest.mark.exhaustive) for layout in layouts(8)),
    ],
)
def test_norm_and_clipping_equal_those_of_one_process_on_every_layout(dp, tp, pp, tied):
    norms = torch_world.run(clipped, dp * tp * pp, dp, tp, pp, tied)
    assert len(set(norms)) == 1
    assert math.isclose(norms[0], 0.1, rel_tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch_world.on(2)
def test_gradients_of_16_bits_are_squared_and_scaled_in_float32(dtype):
    grid = Grid(pp=2)
    stage = nn.Linear(63, 64, dtype=dtype)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 60000)  # 0.01/norm underflows in float16
    before, after = float(clip_grad_norm([stage], grid, 0.01)), float(grad_norm([stage], grid))
    assert math.isclose(before, 60000 * math.sqrt(2 * 64**2), rel_tol=2e-3)
    assert math.isclose(after, 0.01, rel_tol=4e-3)


class Plain(nn.Module):
    """A stage without parameters, or with parameters of two dtypes."""

    def __init__(self, some):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16) if some else ()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes)


@torch_world.on(2)
def test_a_stage_may_have_no_parameters_or_several_dtypes():
    grid = Grid(pp=2)
    stage = Plain(some=grid.pp.rank == 1)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with pytest.raises(ArgumentError, match="max_norm: expected at least 0, got -1"):
        clip_grad_norm(stage, grid, -1.0)
    norm, grads = float(clip_grad_norm(stage, grid, 1.0)), [parameter.grad.tolist() for parameter in stage.parameters()]
    assert norm == pytest.approx(6.0)
    for grad in grads:
        assert grad == pytest.approx([1 / 3] * 3, rel=1e-2)


@torch_world.on(2)
def test_tied_weights_count_once_in_compiled_and_wrapped_modules_and_foreign_attributes_are_ignored():
    grid = Grid(pp=2)
    layer = nn.Linear(2, 2)
    layer.shard_specs, layer.tied_copies = 2, lambda: 3
    stage = gpt_stages(config_for(1, 2), grid)[0]
    norms = []
    for module in (layer, stage, torch.compile(stage), nn.Sequential(stage)):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        norms.append(float(grad_norm(module, grid)))
    assert norms[0] == pytest.approx(math.sqrt(2 * 6))
    assert norms[1] == norms[2] == norms[3]
