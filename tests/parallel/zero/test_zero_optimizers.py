"""ZeRO with the optimizers of torch and of users: states of every kind are saved and loaded, others are refused."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from cases.odd_layers import OPTIMIZERS, Odd, trained
from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError, RingcommError
from ringcomm.parallel import Grid, OffloadedOptimizer, ShardedOptimizer, load_checkpoint, save_checkpoint


class Counting(Optimizer):
    """Keeps numbers of Python, flags, strings, integers for each element and None beside a momentum."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, rate=1.0, warm=False, kind="sign", none=None)
                    state.update(signs=torch.zeros_like(p, dtype=torch.int64), seen=torch.tensor(0))
                state["step"] += 1
                state["rate"] *= 0.9
                state["seen"] += 1
                state["signs"] += p.grad.sign().to(torch.int64)
                p.sub_(state["signs"], alpha=group["lr"] * state["rate"] / state["step"])


KINDS = {**OPTIMIZERS, "counting": Counting, "rprop": torch.optim.Rprop}


@torch_world.on(2)
@torch_world.each("kind", KINDS)
def test_states_of_every_kind_are_saved_and_loaded(kind, tmp_path):
    """Through `state_dict`, and through the files of a checkpoint."""
    grid = Grid(dp=2)
    model, second, third = Odd(), Odd(seed=1), Odd(seed=2)
    zero = ShardedOptimizer(model, grid, KINDS[kind], bucket_bytes=3000)
    trained(zero, model, range(2))
    state, weights = zero.state_dict(), {name: x.clone() for name, x in model.state_dict().items()}
    save_checkpoint(tmp_path / kind, model, zero, grid, {})
    expected = trained(zero, model, range(2, 4))
    loaded = ShardedOptimizer(second, grid, KINDS[kind])
    second.load_state_dict(weights)
    loaded.load_state_dict(state)
    assert trained(loaded, second, range(2, 4)) == expected
    resumed = ShardedOptimizer(third, grid, KINDS[kind], stage=1)
    load_checkpoint(tmp_path / kind, third, resumed, grid)
    assert trained(resumed, third, range(2, 4)) == expected


class RefusesStates(SGD):
    def load_state_dict(self, state):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        super().load_state_dict(state)


@torch_world.on(2)
def test_states_that_the_optimizer_of_one_rank_refuses_raise_on_all_and_leave_the_group_usable(tmp_path):
    grid, model = Grid(dp=2), Odd()
    zero = ShardedOptimizer(model, grid, partial(RefusesStates, lr=0.1))
    save_checkpoint(tmp_path, model, RefusesStates(model.parameters()), grid, {})
    kind = ZeroDivisionError if grid.dp.rank else RingcommError
    raised(kind, lambda: zero.load_state_dict(zero.state_dict()))
    raised(kind, lambda: load_checkpoint(tmp_path, model, RefusesStates(model.parameters()), grid))
    trained(zero, model, range(1))


class TrustRatio(SGD):
    """Scales an update by norms, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []


@torch_world.on(2)
@torch_world.each("factory", [torch.optim.Adafactor, TrustRatio, *MUON])
def test_an_optimizer_that_looks_at_more_than_an_element_is_refused(factory):
    grid, model = Grid(dp=2), nn.Linear(8, 8, bias=False)
    text = f"expected one that updates each element by itself, as AdamW does, got {factory.__name__}"
    if factory in MUON:  # which takes matrices only
        text += ", which raised"
    assert str(raised(ArgumentError, lambda: ShardedOptimizer(model, grid, factory))).startswith(f"optimizer: {text}")
    offloaded = raised(ArgumentError, lambda: OffloadedOptimizer(model.parameters(), factory))
    assert str(offloaded).startswith(f"factory: {text}")


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (torch.optim.LBFGS, "LBFGS, which raised TypeError: .*missing 1 required positional argument: 'closure'"),
        (torch.optim.SparseAdam, "SparseAdam, which raised RuntimeError: .*dense gradients"),
    ],
)
@torch_world.on(2)
def test_an_optimizer_whose_step_raises_is_refused_with_its_error(factory, error):
    grid, model = Grid(dp=2), nn.Linear(8, 8)
    text = str(raised(ArgumentError, lambda: ShardedOptimizer(model, grid, factory)))
    assert re.search(f"optimizer: expected one that updates each element by itself, as AdamW does, got {error}", text)
    text = str(raised(ArgumentError, lambda: OffloadedOptimizer(model.parameters(), factory)))
    assert re.search(f"factory: .*{error}", text)
    ShardedOptimizer(model, grid, SGD)  # the groups are usable


def of_two_parameters(parameters):
    """Make an optimizer for a model of two parameters only."""
    return SGD([{"params": [parameters[0]]}, {"params": [parameters[1]]}])


@pytest.mark.parametrize(
    "factory",
    [
        *KINDS.values(),
        *(getattr(torch.optim, name) for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")),
        partial(OffloadedOptimizer, factory=torch.optim.AdamW),
        of_two_parameters,
    ],
)
@torch_world.on(1)
def test_other_optimizers_are_not_refused(factory):
    ShardedOptimizer(nn.Linear(8, 8), Grid(), factory).close()


class Noisy(SGD):
    """Adds noise, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(torch.randn_like(p), alpha=group["lr"])


@pytest.mark.parametrize("wrapped", [False, True])
@torch_world.on(1)
def test_an_optimizer_with_noise_is_tried_before_it_is_made_and_takes_no_random_numbers(wrapped):
    made = []

    def factory(parameters):
        made.append(Noisy(parameters))
        return made[-1]

    model, state = nn.Linear(8, 8), torch.get_rng_state()
    if wrapped:
        optimizer = OffloadedOptimizer(model.parameters(), factory).inner
    else:
        optimizer = ShardedOptimizer(model, Grid(), factory).optimizer
    assert torch.equal(torch.get_rng_state(), state)
    assert made[-1] is optimizer
