"""Communication that is hidden behind weight gradients, and messages between stages that are sent in parts."""

from contextlib import contextmanager, nullcontext
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from cases.pipelines import gpt_pipeline
from cases.small_gpt import batch_of, config_for
from harness import torch_world
from harness.failures import raised
from ringcomm import RingcommError
from ringcomm.parallel import ColumnParallelLinear, Grid, ParallelMLP, Pipeline, all_gather, copy_to, make_schedule
from ringcomm.parallel.collectives import reduce_scatter_single
from ringcomm.parallel.model.verify import full_values
from ringcomm.parallel.pipeline.split_backward import backward_input
from ringcomm.parallel.tensor import overlap
from ringcomm.parallel.tensor.overlap import enter_linear
from ringcomm.torch.traffic import bytes_sent, record_traffic

B, S, H, OUT = 2, 8, 6, (10, 4)  # the outputs of two layers on this rank

# --- Entering the sharded region --------------------------------------------------------------------------------------


def linears(count, bias, dtype):
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(H, out, bias, dtype=torch.float64).to(dtype) for out in OUT[:count]]
    return layers, [layer.weight for layer in layers]


def entered(x, layers, tp, sequence_parallel):
    """Return the outputs without overlap."""
    x = all_gather(x, tp, -2) if sequence_parallel else copy_to(x, tp)
    return [layer(x) for layer in layers]


def inputs(tp, sequence_parallel, dtype, shape):
    """Return an input of this rank."""
    full = torch.randn(*shape, H, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(dtype)
    return (full.chunk(tp.size, -2)[tp.rank] if sequence_parallel else full).clone().requires_grad_()


@torch_world.on(1, 2, 4, backends=torch_world.BACKENDS)
@torch_world.each("sequence_parallel", [False, True])
def test_overlap_changes_no_bit(sequence_parallel):
    tp = Grid(tp=dist.get_world_size()).tp
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for count, bias, shape, autocast in (
            (1, True, (B, S), False),
            (1, False, (S,), False),
            (2, True, (B, S), False),
            (2, False, (B, 2, S), False),
            *([(1, True, (B, S), True), (2, False, (B, S), True)] if dtype == torch.float32 else []),
        ):
            found = []
            for function in (enter_linear, None):
                layers, weights = linears(count, bias, dtype)
                x = inputs(tp, sequence_parallel, dtype, shape)
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    if function:
                        outputs = function(x, layers, weights, tp, sequence_parallel)
                    else:
                        outputs = entered(x, layers, tp, sequence_parallel)
                torch.autograd.backward([output.sin().sum() for output in outputs])
                grads = [parameter.grad for layer in layers for parameter in layer.parameters()]
                found.append([*outputs, x.grad, *grads])
            for ours, theirs in zip(*found, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)


class Log(TorchDispatchMode):
    """Records the products and, with `logged`, the beginning and the end of communication."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.events.append((len(args[0]), args[0].shape[1], args[1].shape[1]))
        return function(*args, **(kwargs or {}))


@contextmanager
def logged():
    log = Log()

    def noting(call):
        def noted(*arguments, async_op=False, **options):
            log.events.append("start")
            work = call(*arguments, async_op=True, **options)
            wait = work.wait

            def waited():
                log.events.append("wait")
                return wait()

            work.wait = waited
            if not async_op:
                work.wait()
            return work

        return noted

    with (
        log,
        patch.object(dist, "all_reduce", noting(dist.all_reduce)),
        patch.object(overlap, "reduce_scatter_single", noting(reduce_scatter_single)),
    ):
        yield log.events


TOKENS = B * S
PRODUCTS = [(TOKENS, 10, H), (TOKENS, 4, H)], [(10, TOKENS, H), (4, TOKENS, H)]  # for the input, and for the weights


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
@pytest.mark.parametrize("count", [1, 2])
@torch_world.on(2)
def test_weight_gradients_are_computed_between_the_start_of_the_communication_and_its_end(count, sequence_parallel):
    tp = Grid(tp=2).tp
    layers, weights = linears(count, True, torch.float64)
    outputs = enter_linear(inputs(tp, sequence_parallel, torch.float64, (B, S)), layers, weights, tp, sequence_parallel)
    loss = sum(output.sin().sum() for output in outputs)
    with logged() as events:
        loss.backward()
    for_input, for_weights = (each[:count] for each in PRODUCTS)
    assert events[: count + 1] == [*for_input, "start"]
    assert sorted(events[count + 1 : -1]) == sorted(for_weights)
    assert events[-1] == "wait"


@torch_world.on(2)
def test_a_column_parallel_layer_and_the_mlp_overlap():
    tp = Grid(tp=2).tp
    x = torch.randn(B, S, H, requires_grad=True)
    for layer, products in ((ColumnParallelLinear(H, 10, tp), 1), (ParallelMLP(H, 10, tp, gated=True), 2)):
        y = layer(x)
        with logged() as events:
            y.sum().backward()
        start, end = events.index("start"), events.index("wait")
        assert [each[1] for each in events[start + 1 : end]] == [TOKENS] * products


@torch_world.on(2)
def test_a_backward_in_two_parts_communicates_in_the_first_only():
    """A zero-bubble schedule has no weight gradients to hide it, but computes these later."""
    tp = Grid(tp=2).tp
    layers, weights = linears(2, True, torch.float64)
    x = inputs(tp, False, torch.float64, (B, S))
    loss = sum(output.sin().sum() for output in enter_linear(x, layers, weights, tp, False))
    with logged() as first:
        _, add_gradients = backward_input(get_gradient_edge(loss), x, None)
    with logged() as second:
        add_gradients()
    assert first == [*PRODUCTS[0], "start", "wait"]
    assert sorted(second) == sorted(PRODUCTS[1])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
@torch_world.on(4)
def test_layers_with_a_common_input_communicate_once(sequence_parallel):
    tp = Grid(tp=4).tp
    layers, weights = linears(2, True, torch.float64)
    x = inputs(tp, sequence_parallel, torch.float64, (B, S))
    whole = B * S * H * 8
    with record_traffic() as forward:
        outputs = enter_linear(x, layers, weights, tp, sequence_parallel)
    with record_traffic() as backward:
        sum(output.sum() for output in outputs).backward()
    assert bytes_sent(forward, tp.group) == (Fraction(3, 4) * whole if sequence_parallel else 0)
    assert bytes_sent(backward, tp.group) == Fraction(3, 4) * whole * (1 if sequence_parallel else 2)
    assert len(backward) == 1


@torch_world.on(2)
def test_what_needs_no_gradient_is_neither_computed_nor_sent():
    tp = Grid(tp=2).tp
    layers, weights = linears(2, True, torch.float64)
    x = inputs(tp, False, torch.float64, (B, S))
    outputs = enter_linear(x.detach(), layers, weights, tp, False)
    with logged() as events:
        sum(output.sin().sum() for output in outputs).backward()
    assert sorted(events) == sorted(PRODUCTS[1])
    layers[0].requires_grad_(False)
    outputs = enter_linear(x, layers, weights, tp, False)
    with logged() as events:
        sum(output.sin().sum() for output in outputs).backward()
    assert events == [*PRODUCTS[0], "start", PRODUCTS[1][1], "wait"]
    outputs = enter_linear(x, layers, weights, tp, False)
    with logged() as events:
        outputs[1].sin().sum().backward()  # the other is not used
    assert events == [PRODUCTS[0][1], "start", PRODUCTS[1][1], "wait"]


@torch_world.on(2)
def test_outputs_may_be_changed_in_place():
    layer = ColumnParallelLinear(H, 4, Grid(tp=2).tp)
    x = torch.randn(B, S, H, requires_grad=True)
    F.relu_(layer(x)).sum().backward()
    assert layer.weight.grad is not None


# --- Messages between stages ------------------------------------------------------------------------------------------


def scattered(name, backend):
    """Return the loss and the gradients with and without scatter/gather, and the bytes with it."""
    grid = Grid(tp=2, pp=2)
    config = config_for(2, 4, tied=False)
    schedule = make_schedule(name, 2, 4)
    found = []
    for scatter_gather in (False, True):
        chunks, plain = gpt_pipeline(config, grid, schedule)
        pipe = Pipeline(grid, chunks, schedule, plain.loss_fn, scatter_gather=scatter_gather)
        inputs, targets = batch_of(config, grid, 0)
        for _ in range(2):  # the second knows the shapes
            with record_traffic() as calls:
                loss = pipe.step(inputs, targets)
        grads = full_values("gradient", chunks, grid)
        sent = [bytes_sent(calls, axis.group) for axis in (grid.pp, grid.tp)] if backend == "ringcomm" else [0, 0]
        sizes = {call.payload for call in calls if call.operation == "send"}
        found.append((loss, grads, sent, sizes, pipe.evaluate(inputs, targets)))
    (loss, grads, (pp, tp), sizes, evaluated), (loss_2, grads_2, (pp_2, tp_2), sizes_2, evaluated_2) = found
    assert torch.equal(loss, loss_2)
    assert torch.equal(evaluated, evaluated_2)
    assert all(torch.equal(grad, grads_2[name]) for name, grad in grads.items())
    if backend == "ringcomm":
        message = 2 * config.context * config.hidden * 8  # b · s · h of float64
        messages = (schedule.stages - 1) * 4  # that this rank sends, and as many that it receives
        assert sizes == {message}
        assert sizes_2 == {message // 2}
        assert pp - pp_2 == messages * message // 2
        assert tp_2 - tp == messages * message // 2  # (t-1)/t


@pytest.mark.parametrize(
    ("name", "backend"), [("1f1b", "ringcomm"), ("interleaved", "ringcomm"), ("zb-h1", "ringcomm"), ("1f1b", "gloo")]
)
def test_each_rank_sends_its_part_of_a_message_and_no_bit_changes(name, backend):
    torch_world.run(scattered, 4, name, backend, backend=backend)


def odd_message():
    """Return the error of a step whose messages have 3 elements, which two ranks cannot share."""
    grid = Grid(tp=2, pp=2)
    pipe = Pipeline(grid, nn.Linear(3, 3), make_schedule("1f1b", 2, 2), F.mse_loss, scatter_gather=True)
    error = raised(RingcommError, lambda: pipe.step(torch.ones(2, 3), torch.ones(2, 3)))
    return type(error).__name__, str(error)


def test_messages_that_cannot_be_divided_fail_the_step_on_all_ranks():
    first, second, *others = torch_world.run(odd_message, 4)
    text = "elements of the output of stage 0, (1, 3): expected a multiple of tp = 2, got 3"
    assert first == second == ("ArgumentError", text)
    assert [kind for kind, _ in others] == ["Aborted"] * 2
