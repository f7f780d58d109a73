"""Weights that the program changes after an optimizer is built are trained on; reads after a step see all of it."""

import io
import time
from copy import copy, deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases.odd_layers import Odd, loss_of, same
from harness import torch_world
from ringcomm.parallel import DataParallel, Grid, MixedPrecision, ShardedOptimizer

sgd = partial(torch.optim.SGD, lr=0.1)


class Mixed:
    """MixedPrecision and DataParallel, with the methods of a ShardedOptimizer."""

    def __init__(self, model, grid, dtype):
        self.mixed = MixedPrecision(model, grid, sgd, dtype or torch.float32)
        self.finish_grad_sync = DataParallel(model, grid.dp_cp).finish_grad_sync

    def step(self):
        self.mixed.step()
        self.mixed.zero_grad()


def load(model):
    model.load_state_dict({name: x.double() + 1 for name, x in model.state_dict().items()})


def halve(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def assign(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def trained(trainer, model, grid, dtype, steps):
    for step in steps:
        loss_of(model, step, grid.dp, dtype or torch.float32).backward()
        trainer.finish_grad_sync()
        trainer.step()


@torch_world.on(2)
@torch_world.each("change", [load, halve, assign])
@torch_world.each("dtype", [None, torch.bfloat16])
@torch_world.each("build", [Mixed, partial(ShardedOptimizer, optimizer=sgd)])
def test_changed_weights_are_trained_as_by_an_optimizer_built_after_the_change(build, dtype, change):
    grid, model = Grid(dp=2), Odd(dtype=torch.float32)
    trainer = build(model, grid=grid, dtype=dtype)
    trained(trainer, model, grid, dtype, range(2))
    change(model)
    other = Odd(dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    fresh = build(other, grid=grid, dtype=dtype)
    same(model, other)
    for each, its_model in ((trainer, model), (fresh, other)):
        trained(each, its_model, grid, dtype, range(2, 4))
    same(model, other)


@torch_world.on(2)
def test_states_contain_changed_weights():
    grid, model = Grid(dp=2), Odd(dtype=torch.float32)
    zero = ShardedOptimizer(model, grid, sgd, torch.bfloat16)
    halve(model)
    masters = zero.state_dict()["masters"]
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            assert torch.equal(masters[number], parameter.float())


class LateOnRank1(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.2 * dist.get_rank())
        return super().step(closure)


def saved(model):
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    return torch.load(file)


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(8, 8))
    average.update_parameters(model)
    return average.module


READS = {  # the parameters by name, however they are read
    "state_dict": lambda model: {name: x.clone() for name, x in model.state_dict().items()},
    "deepcopy": lambda model: deepcopy(model).state_dict(),
    "copy": lambda model: {name: copy(x) for name, x in model.named_parameters()},
    "save": lambda model: saved(model),
    "average": lambda model: averaged(model).state_dict(),
    "list": lambda model: {name: torch.tensor(x.tolist()) for name, x in model.named_parameters()},
}


def stepped(optimizer):
    """Return a model that is a unit, and its optimizer, after a step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    zero = ShardedOptimizer(model, Grid(dp=2), optimizer, units=[model])
    model(torch.ones(2, 8)).square().sum().backward()
    zero.finish_grad_sync()
    zero.step()
    return model, zero


@pytest.mark.parametrize("read", READS)
@torch_world.on(2)
def test_what_reads_parameters_of_units_waits_for_the_step(read):
    """Let the second rank be late in a step, so that the first reads during the all-gather."""
    model, zero = stepped(partial(LateOnRank1, lr=0.1))
    found = READS[read](model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    zero.finish_param_sync()
    for name, x in model.named_parameters():
        assert torch.equal(found[name], x)


@torch_world.on(2)
def test_weights_that_are_written_after_a_step_of_units_stay():
    model, zero = stepped(partial(LateOnRank1, lr=0.1))
    if zero.dp.rank == 0:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3.0)
    zero.finish_param_sync()
    assert all((parameter == 3).all() == (zero.dp.rank == 0) for parameter in model.parameters())


@torch_world.on(2)
def test_asking_for_the_shape_of_a_parameter_does_not_wait():
    model, zero = stepped(sgd)
    weight = model.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.grad) == ((8, 8), 64, torch.float32, None)
    assert zero._shards[0]._gathering
    assert isinstance(weight, nn.Parameter)
    zero.finish_param_sync()
