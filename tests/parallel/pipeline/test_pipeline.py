"""Pipelines: the gradients of one process, bit for bit, for every schedule, in the order of its table."""

import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from cases.pipelines import (
    MICRO_BATCHES,
    ROWS,
    SHAPES,
    batch,
    gpt_pipeline,
    layers,
    one_by_one,
    pipeline,
    schedules,
    with_each,
)
from harness import torch_world
from ringcomm.parallel import DataParallel, GPTConfig, Grid, Pipeline
from ringcomm.pipelining.schedule import BACKWARD, FORWARD, make_schedule
from ringcomm.pipelining.simulation import simulate


def trains(name, chunks, micro_batches, recompute):
    pipe, stages, whole = pipeline(name, chunks, micro_batches, recompute=recompute)
    for step in range(3):  # gradients accumulate
        inputs, targets = batch(micro_batches * ROWS, step)
        loss = pipe.step(inputs, targets)
        assert torch.equal(loss, one_by_one(nn.Sequential(*whole), inputs, targets, micro_batches))
        for chunk, stage in zip(pipe.chunks, stages, strict=True):
            for mine, theirs in zip(chunk.parameters(), whole[stage].parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_gradients_have_the_bits_of_one_process_that_runs_micro_batches_one_by_one(size, backend):
    torch_world.run(with_each, size, trains, SHAPES, MICRO_BATCHES, False, backend=backend)


@pytest.mark.slow
def test_gradients_of_eight_ranks_that_recompute_activations_have_the_same_bits():
    torch_world.run(with_each, 8, trains, SHAPES, MICRO_BATCHES, True)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_may_have_fewer_micro_batches_than_ranks(micro_batches):
    torch_world.run(with_each, 4, trains, [("gpipe", 1), ("1f1b", 1)], micro_batches, False)


# --- The order --------------------------------------------------------------------------------------------------------


def watched(name, chunks):
    """Return the forwards and backwards of this rank's modules, the trace, its times, and the peaks of live tensors.

    The tensors are activations inside the modules, which backward needs, and outputs.
    """
    pipe, _, _ = pipeline(name, chunks)
    seen, activations, outputs, peaks = [], [], [], []

    def alive(references):
        return sum(each() is not None for each in references)

    def note_activation(_module, _inputs, activation):
        activations.append(weakref.ref(activation))

    for number, chunk in enumerate(pipe.chunks):
        counts = {FORWARD: 0, BACKWARD: 0}

        def note(*arguments, phase, number=number, counts=counts):
            seen.append((phase, counts[phase], number))
            counts[phase] += 1
            if phase == FORWARD:
                outputs.append(weakref.ref(arguments[-1]))
                peaks.append((alive(activations), alive(outputs)))

        chunk.inner[1].register_forward_hook(note_activation)
        chunk.register_forward_hook(partial(note, phase=FORWARD))
        chunk.register_full_backward_hook(partial(note, phase=BACKWARD))
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    return seen, [tuple(action) for action, _, _ in pipe.trace], [span[1:] for span in pipe.trace], peaks


@schedules
def test_a_pipeline_runs_the_simulated_table_with_the_simulated_activations_in_flight(name, chunks):
    """The output of a stage dies once it is sent. (The loss of the last stage keeps its input.)"""
    simulated = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks))
    results = torch_world.run(watched, 4, name, chunks)
    assert tuple(max(activations for activations, _ in peaks) for *_, peaks in results) == simulated.peaks
    assert {outputs for *_, peaks in results[:-1] for _, outputs in peaks} == {1}
    for row, (seen, trace, times, _) in zip(simulated.spans, results, strict=True):
        assert seen == trace == [tuple(action) for action, _, _ in row]
        assert times == sorted(times)
        assert all(begin <= end for begin, end in times)


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 2)])
@torch_world.on(2)
def test_recomputation_repeats_each_forward_and_evaluation_keeps_no_graph(recompute, times):
    pipe, _, _ = pipeline("1f1b", 1, recompute=recompute)
    seen = []
    pipe.chunks[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    pipe.evaluate(*batch(MICRO_BATCHES * ROWS))
    assert seen == [True] * times * MICRO_BATCHES + [False] * MICRO_BATCHES


# --- Replicas ---------------------------------------------------------------------------------------------------------


def with_replicas(name, chunks, scale):
    grid = Grid(dp=2, pp=2)
    schedule = make_schedule(name, 2, 4, chunks)
    mine, whole = layers(schedule.stages), layers(schedule.stages)
    stages = [schedule.stage(grid.pp.rank, chunk) for chunk in range(chunks)]
    modules = [mine[stage] for stage in stages]
    data_parallel = DataParallel(modules, grid.dp)
    pipe = Pipeline(grid, modules, schedule, F.mse_loss, data_parallel=data_parallel)
    inputs, targets = batch(2 * 4 * ROWS)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        loss = pipe.step(inputs.chunk(2)[grid.dp.rank], targets.chunk(2)[grid.dp.rank], scale)
    elements = sum(parameter.numel() for module in modules for parameter in module.parameters())
    assert sum(call.args[0].numel() for call in all_reduce.call_args_list) == 1 + elements
    torch.testing.assert_close(loss, one_by_one(nn.Sequential(*whole), inputs, targets, 8), rtol=1e-12, atol=1e-12)
    for module, stage in zip(modules, stages, strict=True):
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, scale * theirs.grad, rtol=1e-12, atol=1e-12)


def test_replicas_average_gradients_once_per_step():
    torch_world.run(with_each, 4, with_replicas, SHAPES, 1024.0)


@torch_world.on(2)
def test_frozen_tied_weights_have_no_gradients():
    grid = Grid(pp=2)
    config = GPTConfig(vocab_size=8, context=4, layers=2, hidden=8, heads=2)
    chunks, pipe = gpt_pipeline(config, grid, make_schedule("1f1b", 2, 2))
    chunks[0].embedding.requires_grad_(False)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    pipe.step(ids, ids)
    missing = [name for name, parameter in chunks[0].named_parameters() if parameter.grad is None]
    assert missing == ["embedding.weight"]


# --- Evaluation -------------------------------------------------------------------------------------------------------


def evaluated(name, chunks, rows):
    """Evaluate batches whose replicas have these numbers of rows; return the errors of the losses, and the calls."""
    grid = Grid(dp=2, pp=2)
    schedule = make_schedule(name, 2, 4, chunks)
    whole = layers(schedule.stages)
    modules = [whole[schedule.stage(grid.pp.rank, chunk)] for chunk in range(chunks)]
    pipe = Pipeline(grid, modules, schedule, F.mse_loss)
    sizes = []
    modules[0].register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    inputs, targets = batch(sum(rows))
    mine = [each.split(rows)[grid.dp.rank] for each in (inputs, targets)]
    losses = [pipe.evaluate(*mine) for _ in range(2)]  # the second knows the shapes
    assert losses[0].equal(losses[1])
    seen = [*sizes]
    expected = F.mse_loss(nn.Sequential(*whole)(inputs), targets)
    return float(losses[0] - expected), seen


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ((8, 8), ([2] * 4, [2] * 4)),
        ((7, 3), ([2, 2, 2, 1], [1] * 3)),
        ((9, 0), ([3] * 3, [])),
        ((1, 5), ([1], [2, 2, 1])),
    ],
    ids=str,
)
def test_an_evaluated_batch_may_have_any_number_of_rows(name, chunks, rows, sizes):
    found = torch_world.run(evaluated, 4, name, chunks, rows)
    for rank, (error, seen) in enumerate(found):
        assert abs(error) < 1e-12
        assert seen == 2 * sizes[rank % 2]


@torch_world.on(2)
def test_the_loss_of_no_rows_is_nan():
    pipe, _, _ = pipeline("1f1b", 1)
    assert pipe.evaluate(*batch(0)).isnan()
