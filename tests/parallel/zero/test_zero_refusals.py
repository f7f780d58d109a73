"""ZeRO: what is refused changes nothing, a rank that fails leaves no other waiting, and mixed kinds of parameters."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from cases.odd_layers import Odd, adamw, loss_of
from harness import torch_world
from harness.failures import PROMPT, raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import Grid, MixedPrecision, OffloadedOptimizer, ShardedOptimizer


def values(state):
    """Return all numbers of states of an optimizer."""
    tensors = [*state["masters"].values(), *(x for each in state["state"].values() for x in each.values())]
    return [torch.as_tensor(x).tolist() for x in tensors]


@torch_world.on(2)
def test_refused_states_change_no_replica():
    grid, rank, model = Grid(dp=2), dist.get_rank(), Odd()
    zero = ShardedOptimizer(model, grid, adamw)
    loss_of(model, 0, grid.dp).backward()
    zero.finish_grad_sync()
    zero.step()
    before = zero.state_dict()
    other = {**before, "state": {n: {**x, "step": x["step"] + 7} for n, x in before["state"].items()}}
    wrong = [{**other, "masters": {0: torch.ones(3)}}, {**other, "state": {**other["state"], 99: {}}}]
    for each in wrong:
        raised(ArgumentError, lambda each=each: zero.load_state_dict(each if rank else other))
        assert values(zero.state_dict()) == values(before)
    zero.load_state_dict(before)


@torch_world.on(2)
def test_a_refused_dtype_of_gradients_leaves_the_model_as_it_is():
    grid, model = Grid(dp=2), Odd()
    dtype = torch.int32 if dist.get_rank() else torch.float32
    raised(ArgumentError, lambda: ShardedOptimizer(model, grid, adamw, torch.bfloat16, grad_dtype=dtype))
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())


@torch_world.on(2)
def test_parameters_of_two_dtypes_with_gradients_of_one_keep_theirs():
    grid = Grid(dp=2)
    model = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8)])
    before = [parameter.clone() for parameter in model.parameters()]
    zero = ShardedOptimizer(model, grid, partial(torch.optim.SGD, lr=0.1), grad_dtype=torch.float32)
    zero.finish_param_sync()
    for parameter, value in zip(model.parameters(), before, strict=True):
        other = value.clone()
        dist.broadcast(other, 0)
        assert parameter.dtype == value.dtype
        assert torch.equal(parameter, other)


@torch_world.on(2)
def test_a_frozen_tied_weight_is_left_alone():
    grid, model = Grid(dp=2), Odd()
    frozen, *_ = model.parameters()
    frozen.requires_grad_(False)
    zero = ShardedOptimizer(model, grid, adamw, tied=[(frozen, grid.ends.group)])
    before = frozen.clone()
    loss_of(model, 0, grid.dp).backward()
    zero.finish_grad_sync()
    zero.step()
    assert torch.equal(frozen, before)


@torch_world.on(2)
def test_gradients_that_are_collected_at_the_end_take_two_buffers():
    grid, model = Grid(dp=2), nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    zero = ShardedOptimizer(model, grid, adamw, bucket_bytes=1)
    made = []
    for bucket in zero._buckets:
        bucket.new_buffer = lambda size, real=bucket.new_buffer: made.append(real(size)) or made[-1]
    with zero.no_sync():
        model(torch.ones(2, 16)).sum().backward()
    zero.finish_grad_sync()
    assert len(zero._buckets) > 8
    assert len(made) == 2


@torch_world.on(2)
def test_what_creates_no_optimizer_is_refused_on_all_ranks():
    grid, model = Grid(dp=2), Odd()
    expected = "expected a function that creates a torch.optim.Optimizer for a list of parameters, got"
    makers = {
        "optimizer": (
            lambda factory, module=model: ShardedOptimizer(module, grid, factory),
            lambda factory, module=model: MixedPrecision(module, grid, factory, torch.float32),
        ),
        "factory": (lambda factory, module=model: OffloadedOptimizer(module.parameters(), factory),),
    }
    wrong = {"a SGD": torch.optim.SGD(model.parameters()), "a NoneType": None, "one that returns a int": lambda _: 3}
    for what, make in ((what, each) for what, made in makers.items() for each in made):
        for got, factory in wrong.items():
            assert str(raised(ArgumentError, lambda: make(factory))) == f"{what}: {expected} {got}"  # noqa: B023 (called in this turn)
        text = str(raised(ArgumentError, lambda: make(torch.optim.SGD, nn.ReLU())))  # noqa: B023 (called in this turn)
        assert text == f"{what}: expected at least one parameter to optimize, got none"
    text = str(raised(ArgumentError, lambda: ShardedOptimizer(model, grid, adamw, stage="2")))
    assert text == "stage: expected 1 or 2; torch's fully_shard is stage 3, got '2'"
    ShardedOptimizer(model, grid, adamw)  # the groups are usable


class Failing(torch.optim.SGD):
    tried = False

    def step(self, closure=None):
        if self.tried and dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        return super().step(closure)


@torch_world.on(3)
def test_a_step_that_fails_on_one_rank_fails_on_all_at_once():
    grid, model = Grid(dp=3), Odd()
    zero = ShardedOptimizer(model, grid, partial(Failing, lr=0.1))
    zero.optimizer.tried = True
    loss_of(model, 0, grid.dp).backward()
    zero.finish_grad_sync()
    begun = time.monotonic()
    raised(ZeroDivisionError if grid.dp.rank == 1 else Aborted, zero.step)
    assert time.monotonic() - begun < PROMPT


@torch_world.on(2)
def test_a_gradient_that_is_refused_on_one_rank_ends_the_others():
    grid = Grid(dp=2)
    model = nn.Embedding(8, 4, sparse=grid.dp.rank == 1)
    zero = ShardedOptimizer(model, grid, partial(torch.optim.SGD, lr=0.1))
    with zero.no_sync():
        model(torch.tensor([1, 2])).sum().backward()
    raised(ArgumentError if grid.dp.rank == 1 else Aborted, zero.finish_grad_sync)


@torch_world.on(4)
def test_replicas_that_differ_in_one_stage_are_refused_on_all_ranks():
    grid, rank, model = Grid(dp=2, pp=2), dist.get_rank(), nn.Linear(4, 4)
    model.bias.requires_grad_(rank != 1)
    text = str(raised(ArgumentError, lambda: ShardedOptimizer(model, grid, adamw)))
    tensor = "tensor 1 of replica 1 (rank 1): expected as on rank 0, 0.bias (4,) torch.float32 requires_grad=True"
    assert text == f"{'' if rank < 2 else 'rank 0: '}{tensor}, got 0.bias (4,) torch.float32 requires_grad=False"
    dist.barrier(grid.world.group)  # the groups are usable
