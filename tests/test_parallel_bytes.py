"""What is sent in a step, counted call by call in the backend, is what the formulas say: exactly."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import torch_world
from ringcomm import ArgumentError
from ringcomm.parallel import (
    DataParallel,
    Grid,
    MixedPrecision,
    Pipeline,
    all_gather,
    copy_to,
    gather_from,
    gpt_loss,
    gpt_stages,
    grad_norm,
    make_schedule,
    reduce_from,
    reduce_scatter,
    scatter_to,
    vocab_parallel_cross_entropy,
)
from ringcomm.parallel.gpt import GPTStage
from ringcomm.parallel.verify import Call, data_parallel_bytes, pipeline_bytes, sent, tensor_parallel_bytes, traffic
from test_parallel_gpt import config_for

BATCH, LAYERS, MICRO_BATCHES = 3, 2, 4


def layers(sequence_parallel):
    """Count a step of transformer layers alone; return bytes, the formula, calls, and 2(t-1)/t · h."""
    grid = Grid(tp=dist.get_world_size())
    t = grid.tp.size
    config = config_for(t, 1, sequence_parallel=sequence_parallel)
    stage = GPTStage(config, grid.tp, range(LAYERS), first=False, last=False).double()
    x = torch.randn(BATCH, config.context // (t if sequence_parallel else 1), config.hidden, dtype=torch.float64)
    x.requires_grad_()
    with traffic() as calls:
        stage(x).sum().backward()
    formula = tensor_parallel_bytes(t, BATCH, config.context, config.hidden, LAYERS, 8)
    return sent(calls, grid.tp), formula, len(calls), Fraction(2 * (t - 1), t) * config.hidden * 8


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_tensor_parallel_layer_sends_four_all_reduces_of_its_activations(size):
    for got, formula, calls, _ in torch_world.run(layers, size, False):
        assert got == formula
        assert (got > 0) is (size > 1)
        assert calls == (4 * LAYERS if size > 1 else 0)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism_sends_as_much_and_the_gradients_of_what_is_whole(size):
    for got, formula, calls, vector in torch_world.run(layers, size, True):
        whole = 2 * 2 + 2  # two norms of two vectors each, and the biases of two rows
        assert got == formula + LAYERS * whole * vector
        assert calls == LAYERS * (8 + whole)


def model():
    """Count a step of a whole model, on both axes."""
    grid = Grid(2, 2)
    config = config_for(2, 1)
    chunks = gpt_stages(config, grid)
    replicas = DataParallel(chunks, grid.dp)
    ids = torch.zeros(BATCH, config.context, dtype=torch.int64)
    with traffic() as calls:
        gpt_loss(config, grid)(chunks[0](ids), ids).backward()
        replicas.finish()
    tokens = BATCH * config.context
    ends = Fraction(2 * (2 - 1), 2) * tokens * (2 * config.hidden + 3) * 4  # embedding and output, then the loss
    parameters = sum(parameter.numel() for parameter in chunks[0].parameters())
    formula = tensor_parallel_bytes(2, BATCH, config.context, config.hidden, config.layers, 4) + ends
    assert sent(calls, grid.tp) == formula
    assert sent(calls, grid.dp) == data_parallel_bytes(2, parameters, 4) == parameters * 4
    assert sent(calls, grid.pp) == 0


def test_a_model_sends_its_layers_its_ends_its_loss_and_its_gradients_and_nothing_else():
    torch_world.run(model, 4)


def staged(schedule, chunks):
    """Count a step of a pipeline, the second one: in the first its ranks agree on shapes."""
    grid = Grid(tp=2, pp=2)
    config = config_for(2, 2)
    table = make_schedule(schedule, 2, MICRO_BATCHES, chunks)
    pipeline = Pipeline(grid, gpt_stages(config, grid, chunks=chunks), table, gpt_loss(config, grid))
    ids = torch.zeros(MICRO_BATCHES * BATCH, config.context, dtype=torch.int64)
    pipeline.step(ids, ids)
    with traffic() as calls:
        pipeline.step(ids, ids)
    boundaries = 2 * chunks - 1  # over one end of the pipeline nothing goes
    formula = pipeline_bytes(boundaries, MICRO_BATCHES * BATCH, config.context, config.hidden, 4)
    messages = [call for call in calls if call.operation == "send"]
    assert len(messages) == boundaries * MICRO_BATCHES
    assert sent(messages, grid.pp) == formula
    assert sent(calls, grid.pp) == formula + 8  # and the loss
    layers = tensor_parallel_bytes(2, MICRO_BATCHES * BATCH, config.context, config.hidden, config.layers // 2, 4)
    tokens = MICRO_BATCHES * BATCH * config.context
    ends = [tokens * config.hidden * 4, tokens * (config.hidden + 3) * 4]  # embedding; output and loss
    assert sent(calls, grid.tp) == layers + ends[grid.pp.rank]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_pipeline_sends_its_activations_over_each_boundary_both_ways_and_the_loss(schedule, chunks):
    torch_world.run(staged, 4, schedule, chunks)


def conjugates():
    """Return what each pair sends forward, and backward, in parts of the whole tensor."""
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
        with traffic() as forward:
            y = function(x, grid.tp, *arguments)
        with traffic() as backward:
            y.sum().backward()
        found[function.__name__] = [float(sent(calls, grid.tp) / whole) for calls in (forward, backward)]
    return found


def test_collectives_with_gradients_send_what_their_docstrings_say():
    for found in torch_world.run(conjugates, 4):
        assert found == {
            "copy_to": [0, 1.5],
            "reduce_from": [1.5, 0],
            "gather_from": [0.75, 0],
            "scatter_to": [0, 0.75],
            "all_gather": [0.75, 0.75],
            "reduce_scatter": [0.75, 0.75],
        }


def numbers():
    """Return how many numbers a rank of two sends: for the loss of five tokens, a norm, a step of 16 bits."""
    grid = Grid(tp=2)
    logits, targets = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)
    found = []
    for smoothing in (0.0, 0.1):
        with traffic() as calls:
            vocab_parallel_cross_entropy(logits, targets, grid.tp, label_smoothing=smoothing)
        found.append(sent(calls, grid.tp) / 4)
    chunks = gpt_stages(config_for(2, 1), grid)
    with traffic() as calls:
        grad_norm(chunks, grid)
    found.append(sent(calls, grid.model) / 8)
    precision = MixedPrecision(chunks, grid, lambda masters: torch.optim.SGD(masters, lr=1.0), torch.bfloat16)
    with traffic() as calls:
        precision.step()
    return [*found, sent(calls, grid.world) / 4, sent(calls, grid.model) / 8]


def test_losses_norms_and_steps_send_as_many_numbers_as_they_say():
    for found in torch_world.run(numbers, 2):
        assert found == [3 * 5, 4 * 5, 1, 1, 1]


def as_defined():
    grid = Grid(tp=4)
    x, parts = torch.zeros(12), torch.zeros(3)
    with traffic() as calls:
        for call in (
            lambda: dist.all_reduce(x, group=grid.tp.group),
            lambda: dist.all_gather_into_tensor(x, parts, group=grid.tp.group),
            lambda: dist.reduce_scatter_tensor(parts, x, group=grid.tp.group),
            lambda: dist.broadcast(x, 0, group=grid.tp.group, async_op=True).wait(),
        ):
            call()
    with pytest.raises(ArgumentError, match=r"the calls: expected some of all_reduce, .*, got gather"):
        sent([Call("gather", 8, grid.tp.group.group_name)], grid.tp)
    assert [call.operation for call in calls] == ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    return [sent([call], grid.tp) for call in calls]


def test_calls_count_as_nccl_tests_counts_them():
    for found in torch_world.run(as_defined, 4):
        assert found == [48 * 6 / 4, 48 * 3 / 4, 48 * 3 / 4, 48]
