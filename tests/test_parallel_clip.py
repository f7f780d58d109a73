"""The norm of gradients, and clipping, on every layout: as in one process."""

import math

import pytest
import torch
from torch import nn

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import Grid, clip_grad_norm, gpt_stages, grad_norm
from ringcomm.parallel.layout import cut, full_shape, splits
from ringcomm.parallel.seed import mixed
from ringcomm.parallel.verify import full_gradients
from test_parallel_gpt import config_for, layouts


def give_gradients(chunks, tp):
    """Set gradients that are made from the name: part of the same full ones on every layout."""
    for chunk in chunks:
        found = splits(chunk)
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(mixed(name))
            full = torch.randn(full_shape(parameter, found.get(name)), dtype=torch.float64, generator=generator)
            parameter.grad = (cut(full, found[name], tp) if name in found else full).to(parameter.dtype)


def clipped(dp, tp, pp, tied):
    grid, alone = Grid(dp, tp, pp), Grid.alone()
    config = config_for(tp, pp, tied=tied, sequence_parallel=True)
    chunks = [chunk.double() for chunk in gpt_stages(config, grid, chunks=2)]
    whole = [chunk.double() for chunk in gpt_stages(config, alone)]
    for each, axis in ((chunks, grid.tp), (whole, alone.tp)):
        give_gradients(each, axis)
    for most in (1e9, 3.0, 0.1):
        expected = nn.utils.clip_grad_norm_(whole[0].parameters(), most)
        norm = clip_grad_norm(chunks, grid, most)
        assert math.isclose(norm, expected, rel_tol=1e-12)
        one = full_gradients(whole, alone)
        for name, grad in full_gradients(chunks, grid).items():
            torch.testing.assert_close(grad, one[name], rtol=1e-12, atol=0)
    return float(grad_norm(chunks, grid))


@pytest.mark.parametrize(("dp", "tp", "pp"), [*layouts(1), *layouts(2), *layouts(4), (2, 2, 2)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_norm_and_clipping_are_those_of_one_process_on_every_layout(dp, tp, pp, tied):
    norms = torch_world.run(clipped, dp * tp * pp, dp, tp, pp, tied)
    assert len(set(norms)) == 1
    assert math.isclose(norms[0], 0.1, rel_tol=1e-4)


def of_16_bits(dtype):
    grid = Grid(pp=2)
    stage = nn.Linear(63, 64, dtype=dtype)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 60000)  # 0.01/norm is less than the least number of float16
    return float(clip_grad_norm([stage], grid, 0.01)), float(grad_norm([stage], grid))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_16_bits_are_squared_and_scaled_in_32(dtype):
    for before, after in torch_world.run(of_16_bits, 2, dtype):
        assert math.isclose(before, 60000 * math.sqrt(2 * 64**2), rel_tol=2e-3)
        assert math.isclose(after, 0.01, rel_tol=4e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dp", "tp", "pp"), layouts(8))
def test_norm_and_clipping_on_every_layout_of_eight(dp, tp, pp):
    torch_world.run(clipped, 8, dp, tp, pp, True)


class Plain(nn.Module):
    """A stage without parameters, or with parameters of two dtypes."""

    def __init__(self, some):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16) if some else ()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes)


def uneven():
    grid = Grid(pp=2)
    stage = Plain(some=grid.pp.rank == 1)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with pytest.raises(ArgumentError, match="max_norm: expected a number from 0, got -1"):
        clip_grad_norm(stage, grid, -1.0)
    return float(clip_grad_norm(stage, grid, 1.0)), [parameter.grad.tolist() for parameter in stage.parameters()]


def test_a_stage_may_have_no_parameters_or_several_dtypes():
    for norm, grads in torch_world.run(uneven, 2):
        assert norm == pytest.approx(6.0)
        for grad in grads:
            assert grad == pytest.approx([1 / 3] * 3, rel=1e-2)


def named_otherwise():
    """Return the norm of a layer whose attributes have the names of what cuts weights, and mean something else."""
    layer = nn.Linear(2, 2)
    layer.split, layer.copies = 2, lambda: 3
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    return float(grad_norm(layer, Grid(tp=2)))


def test_attributes_of_other_layers_may_be_called_split_and_copies():
    assert torch_world.run(named_otherwise, 2) == pytest.approx([math.sqrt(6)] * 2)


def wrapped():
    grid = Grid(pp=2)
    stages = gpt_stages(config_for(1, 2), grid)
    norms = []
    for wrap in (lambda stage: stage, torch.compile, nn.Sequential):
        for parameter in stages[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        norms.append(float(grad_norm(wrap(stages[0]), grid)))
    return norms


def test_tied_weights_count_once_in_a_module_that_is_compiled_or_wrapped():
    for norms in torch_world.run(wrapped, 2):
        assert norms[0] == norms[1] == norms[2]
