"""Pipelines: the gradients of one process, bit by bit, for every schedule, in the order of its table."""

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import torch_world
from pipelines import MICRO_BATCHES, ROWS, WIDTH, batch, layers, one_by_one, pipeline, schedules
from ringcomm.parallel import DataParallel, Grid, Pipeline
from ringcomm.parallel.schedule import BACKWARD, FORWARD, make_schedule, simulate


def trains(name, chunks, micro_batches, recompute):
    pipe, stages, whole = pipeline(name, chunks, micro_batches, recompute=recompute)
    for step in range(3):  # gradients go on being added to
        inputs, targets = batch(micro_batches * ROWS, step)
        loss = pipe.step(inputs, targets)
        assert torch.equal(loss, one_by_one(nn.Sequential(*whole), inputs, targets, micro_batches))
        for chunk, stage in zip(pipe.chunks, stages, strict=True):
            for mine, theirs in zip(chunk.parameters(), whole[stage].parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


@schedules
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_gradients_have_the_bits_of_one_process_that_takes_micro_batches_one_by_one(size, name, chunks, backend):
    torch_world.run(trains, size, name, chunks, MICRO_BATCHES, False, backend=backend)


@pytest.mark.slow
@schedules
def test_eight_ranks_do_too(name, chunks):
    torch_world.run(trains, 8, name, chunks, MICRO_BATCHES, False)


@schedules
def test_they_do_if_activations_are_recomputed(name, chunks):
    torch_world.run(trains, 4, name, chunks, MICRO_BATCHES, True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_there_may_be_fewer_micro_batches_than_ranks(name, micro_batches):
    torch_world.run(trains, 4, name, 1, micro_batches, False)


# --- The order --------------------------------------------------------------------------------------------------------


def watched(name, chunks):
    """Return what the modules of this rank saw, as they saw it."""
    pipe, _, _ = pipeline(name, chunks)
    seen = []
    for number, chunk in enumerate(pipe.chunks):
        counts = {FORWARD: 0, BACKWARD: 0}

        def note(*_, work, number=number, counts=counts):
            seen.append((work, counts[work], number))
            counts[work] += 1

        chunk.register_forward_hook(partial(note, work=FORWARD))
        chunk.register_full_backward_hook(partial(note, work=BACKWARD))
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    return seen, [tuple(action) for action, _, _ in pipe.trace], [span[1:] for span in pipe.trace]


@schedules
def test_what_is_carried_out_is_the_simulated_table(name, chunks):
    simulated = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks)).spans
    for row, (seen, trace, times) in zip(simulated, torch_world.run(watched, 4, name, chunks), strict=True):
        assert seen == trace == [tuple(action) for action, _, _ in row]
        assert times == sorted(times)
        assert all(begin <= end for begin, end in times)


def sizes_in_flight(name, chunks):
    """Return the most outputs of stages that were alive at once."""
    pipe, _, _ = pipeline(name, chunks)
    outputs, peak = [], 0

    def note(*seen):
        nonlocal peak
        outputs.append(weakref.ref(seen[-1]))
        peak = max(peak, sum(output() is not None for output in outputs))

    for chunk in pipe.chunks:
        chunk.register_forward_hook(note)
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    return peak


@schedules
def test_no_more_is_in_flight_than_simulated(name, chunks):
    peaks = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks)).peaks
    assert tuple(torch_world.run(sizes_in_flight, 4, name, chunks)) == peaks


def forwards(recompute):
    """Return for each forward of a step, and then of an evaluation, whether gradients were wanted."""
    pipe, _, _ = pipeline("1f1b", 1, recompute=recompute)
    seen = []
    pipe.chunks[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    pipe.evaluate(*batch(MICRO_BATCHES * ROWS))
    return seen


@pytest.mark.parametrize(("recompute", "times"), [(False, 1), (True, 2)])
def test_a_stage_runs_forward_once_more_if_it_is_recomputed_and_an_evaluation_keeps_no_graph(recompute, times):
    for seen in torch_world.run(forwards, 2, recompute):
        assert seen == [True] * times * MICRO_BATCHES + [False] * MICRO_BATCHES


# --- Tied weights -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self, weight, layer, first, last):
        super().__init__()
        self.weight, self.layer = weight, layer
        self.first, self.last = first, last

    def forward(self, x):
        x = self.layer(x @ self.weight if self.first else x)
        return x @ self.weight.T if self.last else x


def tied():
    grid = Grid(pp=dist.get_world_size())
    rank, last = grid.pp.rank, grid.pp.size - 1
    inner, whole = layers(grid.pp.size), layers(grid.pp.size)
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
    copy = nn.Parameter(weight.detach().clone())
    stage = Tied(weight if rank in (0, last) else None, inner[rank], rank == 0, rank == last)
    model = nn.Sequential(*(Tied(copy, layer, i == 0, i == last) for i, layer in enumerate(whole)))
    pairs = [(weight, grid.ends.group)] if rank in (0, last) else []
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", grid.pp.size, 4), F.mse_loss, tied=pairs)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (stage, model))
    for step in range(20):
        inputs, targets = batch(4 * ROWS, step)
        loss = pipe.step(inputs, targets)
        torch.testing.assert_close(loss, one_by_one(model, inputs, targets, 4), rtol=1e-12, atol=1e-12)
        for optimizer in (ours, theirs) if step % 2 else ():  # gradients of two batches are added up
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weight, copy, rtol=1e-12, atol=1e-12) if pairs else None
    return weight.detach().tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_tied_weights_stay_the_same_at_both_ends_and_follow_one_process(size):
    weights = torch_world.run(tied, size)
    assert torch.equal(torch.tensor(weights[0]), torch.tensor(weights[-1]))


# --- Replicas ---------------------------------------------------------------------------------------------------------


def with_replicas(name, chunks, scale):
    grid = Grid(dp=2, pp=2)
    schedule = make_schedule(name, 2, 4, chunks)
    mine, whole = layers(schedule.stages), layers(schedule.stages)
    stages = [schedule.stage(grid.pp.rank, chunk) for chunk in range(chunks)]
    modules = [mine[stage] for stage in stages]
    replicas = DataParallel(modules, grid.dp)
    pipe = Pipeline(grid, modules, schedule, F.mse_loss, replicas=replicas)
    calls, all_reduce = [], dist.all_reduce

    def noted(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = noted
    try:
        inputs, targets = batch(2 * 4 * ROWS)
        loss = pipe.step(inputs.chunk(2)[grid.dp.rank], targets.chunk(2)[grid.dp.rank], scale)
    finally:
        dist.all_reduce = all_reduce
    assert sum(calls) == 1 + sum(parameter.numel() for module in modules for parameter in module.parameters())
    torch.testing.assert_close(loss, one_by_one(nn.Sequential(*whole), inputs, targets, 8), rtol=1e-12, atol=1e-12)
    for module, stage in zip(modules, stages, strict=True):
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, scale * theirs.grad, rtol=1e-12, atol=1e-12)


@schedules
def test_replicas_average_once_for_all_micro_batches(name, chunks):
    torch_world.run(with_replicas, 4, name, chunks, 1024.0)
