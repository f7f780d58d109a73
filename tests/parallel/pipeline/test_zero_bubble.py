"""Zero-bubble schedules carried out: backward in two parts, with the bits of one."""

import weakref
from copy import deepcopy
from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from test_pipeline import evaluated, trains, watched, with_replicas
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard

from cases.pipelines import MICRO_BATCHES, ROWS, batch, layers, pipeline, with_each
from cases.small_gpt import compared
from harness import torch_world
from harness.failures import raised
from ringcomm import ArgumentError
from ringcomm.parallel import DataParallel, Grid, Pipeline
from ringcomm.parallel.pipeline.split_backward import backward_input
from ringcomm.pipelining.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, make_schedule
from ringcomm.pipelining.simulation import simulate
from ringcomm.torch.traffic import record_traffic

SHAPES = [("zb-h1", 1), ("zbv", 2)]
schedules = pytest.mark.parametrize(("name", "chunks"), SHAPES)

# --- A backward in two parts ------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """x · wᵀ, with a node that computes both gradients at once."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        Product.calls += 1
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Mixed(nn.Module):
    """Weights that are used once, twice, after another operation, and by a torch.autograd.Function."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.shared, self.convolution = nn.Linear(8, 8), nn.Conv1d(5, 5, 3, padding=1)
        self.direct, self.indirect = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.scale, self.frozen = nn.Parameter(torch.ones(8)), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3)
        x = x + self.shared(torch.sin(self.shared(self.frozen(x)))) + x @ (2 * self.shared.weight)
        x = x + self.attention(x, x, x)[0]
        x = x + Product.apply(x, self.direct) + Product.apply(x, self.indirect.sin())
        return self.convolution(x * self.scale.tanh())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_parts_give_the_bits_of_one_backward(dtype):
    torch.manual_seed(0)
    split = Mixed().to(dtype)
    plain = deepcopy(split)
    for step in range(2):  # gradients accumulate
        x, grad = torch.randn(2, 4, 5, 8, dtype=dtype)
        inputs, outputs = [], []
        for model in (split, plain):
            torch.manual_seed(step)
            inputs.append(x.clone().requires_grad_())
            outputs.append(model(inputs[-1]))
        outputs[1].backward(grad)
        before = [deepcopy(parameter.grad) for parameter in split.parameters()]
        calls = Product.calls
        x_grad, add_gradients = backward_input(get_gradient_edge(outputs[0]), inputs[0], grad)
        assert torch.equal(x_grad, inputs[1].grad)
        assert all(same(parameter.grad, each) for parameter, each in zip(split.parameters(), before, strict=True))
        add_gradients()
        assert Product.calls == calls + 2
        for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
            assert same(ours.grad, theirs.grad)


def same(one, other):
    return one is other is None or torch.equal(one, other)


class Ignored(torch.autograd.Function):
    """Doubles x; a weight gets no gradient."""

    @staticmethod
    def forward(ctx, x, weight):  # noqa: ARG004
        return 2 * x

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return 2 * grad, None


def test_a_function_may_have_no_gradient_for_a_weight_that_is_used_once_twice_or_also_elsewhere():
    once, twice, both = (torch.ones(3, requires_grad=True) for _ in range(3))
    x = torch.ones(3, requires_grad=True)
    y = Ignored.apply(Ignored.apply(Ignored.apply(Ignored.apply(x, once), twice), twice), both) * both
    x_grad, add_gradients = backward_input(get_gradient_edge(y.sum()), x, None)
    add_gradients()
    assert x_grad.tolist() == [16.0] * 3
    assert once.grad is twice.grad is None
    assert both.grad.tolist() == [16.0] * 3


class Watched(nn.Module):
    """Two linear layers and a loss. `matmuls` lists the operands' shapes of each product that backward computes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))

    def forward(self, x):
        return self.inner(x).logsumexp(0).sum()


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.shapes.append(tuple(tuple(each.shape) for each in args))
        return function(*args, **(kwargs or {}))


def test_the_first_part_computes_no_product_for_weights_and_the_second_none_for_inputs():
    x = torch.randn(2, 3, requires_grad=True)
    edge = get_gradient_edge(Watched()(x))
    with Products() as first:
        _, add_gradients = backward_input(edge, x, None)
    with Products() as second:
        add_gradients()
    assert first.shapes == [((2, 7), (7, 5)), ((2, 5), (5, 3))]
    assert second.shapes == [((7, 2), (2, 5)), ((5, 2), (2, 3))]


def test_the_first_stage_runs_its_whole_backward_in_the_second_part_and_a_frozen_stage_none():
    model, frozen = Watched(), Watched().requires_grad_(False)
    x = torch.randn(2, 3)
    x_grad, add_gradients = backward_input(get_gradient_edge(model(x)), x, None)
    assert x_grad is None
    assert model.inner[0].weight.grad is None
    add_gradients()
    assert model.inner[0].weight.grad is not None
    x.requires_grad_()
    x_grad, add_gradients = backward_input(get_gradient_edge(frozen(x)), x, None)
    add_gradients()
    assert x_grad.shape == x.shape


def test_what_autograd_saved_is_freed_by_the_second_part_and_that_of_a_loss_by_the_first():
    model = Watched()
    references = []
    for layer in (model.inner[1], model.inner[2]):
        layer.register_forward_hook(lambda _module, _inputs, output: references.append(weakref.ref(output)))
    x = torch.randn(2, 3, requires_grad=True)
    _, add_gradients = backward_input(get_gradient_edge(model(x)), x, None)
    assert [each() is not None for each in references] == [True, False]
    add_gradients()
    del add_gradients
    assert [each() is not None for each in references] == [False, False]


# --- Pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "backend"), [(1, "ringcomm"), (2, "ringcomm"), (3, "ringcomm"), (4, "ringcomm"), (2, "gloo")]
)
def test_gradients_have_the_bits_of_one_process_that_runs_micro_batches_one_by_one(size, backend):
    torch_world.run(with_each, size, trains, SHAPES, MICRO_BATCHES, False, backend=backend)


@pytest.mark.exhaustive
@schedules
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 17])
@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_gradients_have_these_bits_with_any_number_of_micro_batches(size, name, chunks, micro_batches, backend):
    torch_world.run(trains, size, name, chunks, micro_batches, False, backend=backend)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_may_have_fewer_micro_batches_than_fill_the_pipeline(micro_batches):
    torch_world.run(with_each, 4, trains, SHAPES, micro_batches, False)


@schedules
def test_a_pipeline_runs_the_simulated_table_with_the_simulated_activations_in_flight(name, chunks):
    simulated = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks))
    results = torch_world.run(watched, 4, name, chunks)
    assert tuple(max(activations for activations, _ in peaks) for *_, peaks in results) == simulated.peaks
    for row, (seen, trace, _, _) in zip(simulated.schedule.table, results, strict=True):
        assert trace == [tuple(action) for action in row]
        parts = [action._replace(phase=BACKWARD) if action.phase == BACKWARD_INPUT else action for action in row]
        hooked = [action for action in parts if action.phase != BACKWARD_WEIGHT]
        # The first stage has no gradient of its input, so its hooks run in the backward for weights.
        assert [each for each in seen if each[::2] != (BACKWARD, 0)] == [x for x in hooked if x[::2] != (BACKWARD, 0)]


def test_replicas_average_gradients_once_per_step():
    torch_world.run(with_each, 4, with_replicas, SHAPES, 1024.0)


def reduced():
    """Return the phase and the micro-batch of the action in which this rank starts each all-reduce of gradients."""
    grid = Grid(dp=2, pp=2)
    schedule = make_schedule("zb-h1", 2, 4)
    module = layers(2)[grid.pp.rank]
    pipe = Pipeline(grid, module, schedule, F.mse_loss, data_parallel=DataParallel(module, grid.dp_cp, bucket_bytes=8))
    found = []
    all_reduce = dist.all_reduce

    def noted(tensor, *arguments, **options):
        if options.get("async_op"):
            found.append(schedule.table[grid.pp.rank][len(pipe.trace)][:2])
        return all_reduce(tensor, *arguments, **options)

    with patch.object(dist, "all_reduce", noted):
        pipe.step(*batch(4 * ROWS))
    return found


def test_the_all_reduces_of_gradients_start_in_the_last_backward_for_weights():
    assert torch_world.run(reduced, 4) == [[(BACKWARD_WEIGHT, 3)] * 4] * 4  # a bucket for each parameter


def test_an_evaluated_batch_may_have_any_number_of_rows():
    for error, _ in torch_world.run(evaluated, 4, "zbv", 2, (7, 3)):
        assert abs(error) < 1e-12


def traffic():
    """Return the number of messages this rank sends in a step, and the boundaries of its stages to other ranks."""
    pipe, stages, _ = pipeline("zbv", 2)
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    with record_traffic() as calls:
        pipe.step(*batch(MICRO_BATCHES * ROWS))
    return [call.operation for call in calls].count("send"), stages


def test_zbv_sends_twice_as_many_messages_as_1f1b_and_none_at_the_turn_of_the_v():
    found = torch_world.run(traffic, 4)
    assert [stages for _, stages in found] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert sum(sends for sends, _ in found) == 2 * (2 * 3 * MICRO_BATCHES)


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ((1, 1, 2), "zb-h1", {}),
        ((1, 2, 2), "zb-h1", {"sequence_parallel": True}),
        ((1, 2, 2), "zbv", {"tied": False}),
        ((1, 1, 2), "zbv", {}),
        ((1, 1, 2), "zb-h1", {"recompute": True}),
    ],
    ids=str,
)
def test_a_gpt_trains_as_one_process(layout, name, options):
    torch_world.run(compared, prod(layout), *layout, name, options, 2, torch.float64, 1e-10)


@torch_world.on(2)
def test_recomputation_of_stages_and_sharded_parameters_are_refused():
    grid = Grid(dp=2)
    schedule = make_schedule("zb-h1", 1, 2)
    error = raised(ArgumentError, lambda: Pipeline(grid, nn.Linear(2, 2), schedule, F.mse_loss, recompute=True))
    assert str(error) == "recompute with zb-h1, which splits backward: expected none, got full"
    sharded = fully_shard(nn.Linear(2, 2), mesh=grid.mesh["dp"])
    error = raised(ArgumentError, lambda: Pipeline(grid, sharded, schedule, F.mse_loss))
    assert str(error) == "parameters with zb-h1: expected tensors, because it splits backward, got DTensors"
