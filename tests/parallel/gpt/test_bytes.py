"""The bytes of a step, counted call by call in the backend, equal the formulas exactly."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from cases.pipelines import gpt_pipeline
from cases.small_gpt import config_for
from harness import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    Grid,
    MixedPrecision,
    all_gather,
    copy_to,
    gather_from,
    gpt_stages,
    grad_norm,
    make_schedule,
    reduce_from,
    reduce_scatter,
    scatter_to,
    vocab_parallel_cross_entropy,
)
from ringcomm.parallel.model.gpt import GPTStage
from ringcomm.torch.traffic import RecordedCall, bytes_sent, record_traffic

BATCH, LAYERS = 3, 2


@torch_world.on(1, 2, 4)
@torch_world.each("sequence_parallel", [False, True])
def test_a_transformer_layer_sends_four_all_reduces_or_their_two_halves(sequence_parallel):
    grid = Grid(tp=dist.get_world_size())
    t = grid.tp.size
    config = config_for(t, 1, sequence_parallel=sequence_parallel)
    stage = GPTStage(config, grid, range(LAYERS), first=False, last=False).double()
    x = torch.randn(BATCH, config.context // (t if sequence_parallel else 1), config.hidden, dtype=torch.float64)
    x.requires_grad_()
    with record_traffic() as calls:
        stage(x).sum().backward()
    vector = Fraction(2 * (t - 1), t) * config.hidden * 8
    replicated = 2 * 2 + 2 if sequence_parallel else 0  # gradients of two norms of two vectors, and of two biases
    assert bytes_sent(calls, grid.tp.group) == LAYERS * (4 * BATCH * config.context + replicated) * vector
    assert len(calls) == (LAYERS * ((8 if sequence_parallel else 4) + replicated) if t > 1 else 0)


@torch_world.on(4)
def test_a_model_sends_its_layers_embedding_output_loss_and_gradients_and_nothing_else():
    """Count a step of a whole model, on dp and tp."""
    grid = Grid(2, 2)
    config = config_for(2, 1)
    chunks, pipeline = gpt_pipeline(config, grid, make_schedule("1f1b", 1, 1), dtype=torch.float32)
    ids = torch.zeros(BATCH, config.context, dtype=torch.int64)
    with record_traffic() as calls:
        pipeline.step(ids, ids)
    tokens = BATCH * config.context
    ends = Fraction(2 * (2 - 1), 2) * tokens * (2 * config.hidden + 3) * 4  # embedding and output, then the loss
    parameters = sum(parameter.numel() for parameter in chunks[0].parameters())
    assert bytes_sent(calls, grid.tp.group) == 4 * config.layers * tokens * config.hidden * 4 + ends
    assert bytes_sent(calls, grid.dp.group) == parameters * 4 + 16  # 2(d-1)/d of the parameters, the loss, its count
    assert bytes_sent(calls, grid.pp.group) == 0


@torch_world.on(4)
def test_differentiable_collectives_send_the_bytes_of_their_docstrings():
    grid = Grid(tp=4)
    whole, found = 4 * 12 * 4, {}
    for function, arguments, size in (
        (copy_to, (), 12),
        (reduce_from, (), 12),
        (gather_from, (1,), 3),
        (scatter_to, (1,), 12),
        (all_gather, (1,), 3),
        (reduce_scatter, (1,), 12),
    ):
        x = torch.zeros(4, size, requires_grad=True)
        with record_traffic() as forward:
            y = function(x, grid.tp, *arguments)
        with record_traffic() as backward:
            y.sum().backward()
        found[function.__name__] = [float(bytes_sent(calls, grid.tp.group) / whole) for calls in (forward, backward)]
    assert found == {
        "copy_to": [0, 1.5],
        "reduce_from": [1.5, 0],
        "gather_from": [0.75, 0],
        "scatter_to": [0, 0.75],
        "all_gather": [0.75, 0.75],
        "reduce_scatter": [0.75, 0.75],
    }


@torch_world.on(2)
def test_losses_norms_and_steps_send_the_elements_of_their_docstrings():
    grid = Grid(tp=2)
    logits, targets = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)
    found = []
    for smoothing in (0.0, 0.1):
        with record_traffic() as calls:
            vocab_parallel_cross_entropy(logits, targets, grid.tp, label_smoothing=smoothing)
        found.append(bytes_sent(calls, grid.tp.group) / 4)
    chunks = gpt_stages(config_for(2, 1), grid)
    with record_traffic() as calls:
        grad_norm(chunks, grid)
    found.append(bytes_sent(calls, grid.model.group) / 8)
    precision = MixedPrecision(chunks, grid, lambda masters: torch.optim.SGD(masters, lr=1.0), torch.bfloat16)
    with record_traffic() as calls:
        precision.step()
    found = [*found, bytes_sent(calls, grid.world.group) / 4, bytes_sent(calls, grid.model.group) / 8]
    assert found == [3 * 5, 4 * 5, 1, 1, 1]


@torch_world.on(4)
def test_calls_are_counted_as_nccl_tests_does():
    grid = Grid(tp=4)
    x, parts = torch.zeros(12), torch.zeros(3)
    with record_traffic() as calls:
        for call in (
            lambda: dist.all_reduce(x, group=grid.tp.group),
            lambda: dist.all_gather_into_tensor(x, parts, group=grid.tp.group),
            lambda: dist.reduce_scatter_tensor(parts, x, group=grid.tp.group),
            lambda: dist.broadcast(x, 0, group=grid.tp.group, async_op=True).wait(),
        ):
            call()
    with pytest.raises(ArgumentError, match=r"recorded calls: expected only all_reduce, .*, got gather"):
        bytes_sent([RecordedCall("gather", 8, grid.tp.group.group_name)], grid.tp.group)
    assert [call.operation for call in calls] == ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    found = [bytes_sent([call], grid.tp.group) for call in calls]
    assert found == [48 * 6 / 4, 48 * 3 / 4, 48 * 3 / 4, 48]
