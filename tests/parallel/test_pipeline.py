"""Pipelines: the gradients of one process, bit for bit, for every schedule, in the order of its table."""

import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import torch_world
from pipelines import MICRO_BATCHES, ROWS, batch, layers, one_by_one, pipeline, schedules
from ringcomm.parallel import DataParallel, Grid, Pipeline
from ringcomm.parallel.schedule import BACKWARD, FORWARD, make_schedule, simulate


def trains(name, chunks, micro_batches, recompute):
    pipe, stages, whole = pipeline(name, chunks, micro_batches, recompute=recompute)
    for step in range(3):  # gradients accumulate
        inputs, targets = batch(micro_batches * ROWS, step)
        loss = pipe.step(inputs, targets)
        assert torch.equal(loss, one_by_one(nn.Sequential(*whole), inputs, targets, micro_batches))
        for chunk, stage in zip(pipe.chunks, stages, strict=True):
            for mine, theirs in zip(chunk.parameters(), whole[stage].parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


@schedules
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", torch_world.BACKENDS)
def test_gradients_have_the_bits_of_one_process_that_runs_micro_batches_one_by_one(size, name, chunks, backend):
    torch_world.run(trains, size, name, chunks, MICRO_BATCHES, False, backend=backend)


@pytest.mark.slow
@schedules
def test_gradients_of_eight_ranks_that_recompute_activations_have_the_same_bits(name, chunks):
    torch_world.run(trains, 8, name, chunks, MICRO_BATCHES, True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_may_have_fewer_micro_batches_than_ranks(name, micro_batches):
    torch_world.run(trains, 4, name, 1, micro_batches, False)


# --- The order --------------------------------------------------------------------------------------------------------


def watched(name, chunks):
    """Return the forwards and backwards of this rank's modules, the trace, its times, and the peak of live outputs."""
    pipe, _, _ = pipeline(name, chunks)
    seen, outputs, peaks = [], [], []
    for number, chunk in enumerate(pipe.chunks):
        counts = {FORWARD: 0, BACKWARD: 0}

        def note(*arguments, phase, number=number, counts=counts):
            seen.append((phase, counts[phase], number))
            counts[phase] += 1
            if phase == FORWARD:
                outputs.append(weakref.ref(arguments[-1]))
                peaks.append(sum(output() is not None for output in outputs))

        chunk.register_forward_hook(partial(note, phase=FORWARD))
        chunk.register_full_backward_hook(partial(note, phase=BACKWARD))
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    return seen, [tuple(action) for action, _, _ in pipe.trace], [span[1:] for span in pipe.trace], max(peaks)


@schedules
def test_a_pipeline_runs_the_simulated_table_with_the_simulated_activations_in_flight(name, chunks):
    simulated = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks))
    results = torch_world.run(watched, 4, name, chunks)
    assert tuple(peak for *_, peak in results) == simulated.peaks
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


@schedules
def test_replicas_average_gradients_once_per_step(name, chunks):
    torch_world.run(with_replicas, 4, name, chunks, 1024.0)
