"""A layer with experts: its definition, the bytes it sends, ranks without tokens, conversions, failures, misuse."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import nn

from cases.expert_blocks import INNER, B, E, H, S, Stage, batches_of, double, drawn
from harness import torch_world
from harness.failures import raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import Grid, Pipeline, make_schedule
from ringcomm.parallel.collectives import local_slice
from ringcomm.parallel.experts.layer import Experts, set_loss_factor
from ringcomm.torch.traffic import bytes_sent, record_traffic


def experts_on(grid, seed=1, number=E, **options):
    torch.manual_seed(seed)
    return Experts(H, INNER, number, grid, **options).double()


# --- Definition ---------------------------------------------------------------------------------


def by_definition(layer, x, factor):
    """Return the sum of the outputs' sines, and of the balance loss times `factor`, token by token."""
    total, mean = 0.0, torch.zeros(E, dtype=double)
    used, tokens = torch.zeros(E, dtype=double), x.flatten(0, 1)
    for token in tokens:
        p = torch.exp(layer.router.weight @ token)
        p = p / p.sum()
        best = p.detach().argsort(descending=True)[: layer.top_k].tolist()
        gates = [p[e] / sum(p[other] for other in best) if len(best) > 1 else p[e] for e in best]
        y = 0.0
        for e, gate in zip(best, gates, strict=True):
            mlp = layer.experts[str(e)]
            y = y + gate * (mlp.down.weight @ F.gelu(mlp.up.weight @ token + mlp.up.bias) + mlp.down.bias)
            used[e] += 1
        total, mean = total + y.sin().sum(), mean + p / len(tokens)
    return total + factor * layer.balance * E * (used / used.sum() * mean).sum()


@pytest.mark.parametrize("top_k", [1, 2, 4])
@torch_world.on(1)
def test_a_layer_computes_gates_results_and_balance_loss_of_the_papers(top_k):
    layer = experts_on(Grid.alone(), top_k=top_k, balance=0.3)
    set_loss_factor(layer, 8.0)
    x = drawn(B, S, H).requires_grad_()
    expected = by_definition(layer, x, 8.0)
    inputs = [x, *layer.parameters()]
    grads = torch.autograd.grad(expected, inputs, materialize_grads=True)  # an expert may have no tokens
    loss = layer(x).sin().sum()
    torch.testing.assert_close(loss + 8.0 * layer.balance_loss, expected.detach())
    for grad, other in zip(torch.autograd.grad(loss, inputs), grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-12)


def readable(layer, scores):
    """Run tokens with these scores of experts, and return how much of each expert is in each result."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    nn.init.eye_(layer.router.weight)
    for number, expert in layer.experts.items():
        expert.down.bias.data[int(number)] = 1.0
    x = torch.zeros(1, len(scores), H, dtype=double)
    x[0, :, : len(scores[0])] = torch.tensor(scores, dtype=double)
    return layer(x)[0].detach()


@torch_world.on(1)
def test_choices_beyond_the_capacity_are_dropped_last_choices_first_and_later_tokens_first():
    scores = [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    both = experts_on(Grid.alone(), number=2, capacity_factor=0.5)  # 0.5 · 2 · 4 / 2 = 2 tokens for each
    kept = [[1], [0], [0], [1]]
    assert [y.nonzero().flatten().tolist() for y in readable(both, scores)] == kept
    assert both.dropped == 4
    first = experts_on(Grid.alone(), number=2, capacity_factor=0.7, top_k=1)  # 0.7 · 4 / 2 = 1.4, rounded up
    kept = [y.nonzero().flatten().tolist() for y in readable(first, [[1.0, 0.0]] * 4)]
    assert (kept, first.dropped) == ([[0], [0], [], []], 2)


@torch_world.on(1)
def test_the_balance_loss_is_its_coefficient_if_experts_are_used_evenly_and_e_times_that_if_one_is_used_alone():
    layer = experts_on(Grid.alone(), balance=0.3, top_k=1)
    readable(layer, [[1.0 if e == token else 0.0 for e in range(E)] for token in range(E)])
    assert float(layer.balance_loss) == pytest.approx(0.3)
    readable(layer, [[1000.0, 0.0, 0.0, 0.0]] * 5)
    assert float(layer.balance_loss) == pytest.approx(0.3 * E)


# --- Communication ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence-parallel"])
@torch_world.on(4)
def test_a_layer_sends_the_bytes_of_its_docstring(sequence_parallel):
    grid, alone = Grid(dp=2, ep=2, tp=2), Grid.alone()
    layer = experts_on(grid, sequence_parallel=sequence_parallel)
    rows = [2, 3][grid.ep.rank]  # the ranks have different numbers of tokens
    inputs = [drawn(n, S, H, seed=n) for n in (2, 3)]
    x = inputs[grid.ep.rank]
    whole, leaving = experts_on(alone), []  # rows of each rank for the other
    for rank, each in enumerate(inputs):
        chosen = (each @ whole.router.weight.t()).topk(2)[1]
        leaving.append(int((chosen // (E // 2) != rank).sum()))
    x = (local_slice(x, grid.tp, 1) if sequence_parallel else x).requires_grad_()
    sent = []

    def counted(y, x, receives=None, sends=None, group=None):
        sends = sends or [len(x) // 2] * 2
        sent.append((len(x) - sends[grid.ep.rank]) * x[0].nbytes)
        exchange(y, x, receives, sends, group)

    exchange = dist.all_to_all_single
    with patch.object(dist, "all_to_all_single", counted), record_traffic() as forward:
        y = layer(x)
    with patch.object(dist, "all_to_all_single", counted), record_traffic() as backward:
        y.sum().backward()
    mine, theirs = leaving[grid.ep.rank], leaving[1 - grid.ep.rank]
    assert sent == [8 * E // 2, *(n * H * 8 for n in (mine, theirs, mine, theirs))]
    for calls, number in ((forward, 3), (backward, 2)):
        assert [call.operation for call in calls if call.group == grid.ep.group.group_name] == ["all_to_all"] * number
    tokens = rows * S * 8  # an all-reduce on two ranks sends as many bytes as it has, its two halves half as many
    biases = E // 2 * H * 8
    if sequence_parallel:
        expected = [tokens / 2 * (2 * H + E), tokens / 2 * (2 * H + E) + biases + E * H * 8]
    else:
        expected = [tokens * H, tokens * (H + E) + biases]
    assert [bytes_sent(calls, grid.tp.group) for calls in (forward, backward)] == expected


@torch_world.on(2)
def test_a_rank_without_tokens_and_experts_without_tokens_do_not_stop_the_others():
    grid = Grid(dp=2, ep=2)
    layer, whole = experts_on(grid, top_k=1), experts_on(Grid.alone(), top_k=1)
    x = drawn(2, H) if grid.ep.rank else drawn(0, H)  # two tokens, four experts
    y = layer(x)
    torch.testing.assert_close(y, whole(x))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert torch.isfinite(layer.router.weight.grad).all()


def no_result(_):
    raise RuntimeError("no result")


def failing():
    grid = Grid(dp=2, ep=2)
    stage = Stage(grid, activation=F.gelu if grid.ep.rank else no_result)
    pipeline = Pipeline(grid, stage, make_schedule("gpipe", 1, 1), F.mse_loss)
    error = raised(Exception, lambda: pipeline.step(*batches_of(1, 0)[0]))
    return type(error).__name__, str(error)


def test_an_expert_that_fails_leaves_no_rank_waiting():
    (kind, text), (other, described) = torch_world.run(failing, 2)
    assert (kind, text) == ("RuntimeError", "no result")
    assert other == Aborted.__name__
    assert "rank 0" in described


# --- Conversions and misuse -------------------------------------------------------------------------------------------


@torch_world.on(2)
def test_layers_load_the_states_of_the_whole_layer_and_can_be_copied():
    layer, whole = experts_on(Grid(dp=2, ep=2), seed=1), experts_on(Grid.alone(), seed=2)
    state = whole.state_dict()
    layer.load_state_dict(state)
    x = drawn(B, S, H)
    for each in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(each(x), whole(x))
    own = next(iter(layer.experts))
    with pytest.raises(RuntimeError, match=f"Missing key.*experts.{own}.up.weight"):
        layer.load_state_dict({name: x for name, x in state.items() if name != f"experts.{own}.up.weight"})


@torch_world.on(1)
def test_the_router_computes_in_float32_and_results_have_the_dtype_of_a_linear_layer():
    layer = experts_on(Grid.alone()).bfloat16()
    x = drawn(B, S, H).bfloat16()
    exact = copy.deepcopy(layer).double()
    exact(x.double())
    assert layer(x).dtype == torch.bfloat16
    assert float(layer.balance_loss) == pytest.approx(float(exact.balance_loss), rel=1e-6)
    layer, x = layer.float(), x.float()
    layer(x)
    loss = layer.balance_loss
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == nn.Linear(H, H)(x).dtype == torch.bfloat16
    assert torch.equal(layer.balance_loss, loss)


@torch_world.on(2)
def test_options_that_make_no_sense_are_refused():
    grid = Grid(dp=2, ep=2)
    for number, options, words in (
        (3, {}, "experts: expected a multiple of ep = 2, got 3"),
        (0, {}, "experts: expected an integer from 1 to .*, got 0"),
        (4, {"top_k": 5}, "top_k: expected an integer from 1 to 4, got 5"),
        (4, {"top_k": 0}, "top_k: expected an integer from 1 to 4, got 0"),
        (4, {"capacity_factor": 0.0}, "capacity_factor: expected None or a finite number above 0, got 0.0"),
        (4, {"balance": -1.0}, "balance: expected at least 0, got -1.0"),
    ):
        with pytest.raises(ArgumentError, match=words):
            experts_on(grid, number=number, **options)
    with pytest.raises(ArgumentError, match="out_features: expected a multiple of tp = 2, got 13"):
        Experts(H, 13, E, Grid(tp=2))
