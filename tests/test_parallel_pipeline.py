"""Pipelines: the gradients of one process, bit by bit, for every schedule; what is sent; and ranks that die."""

import os
import re
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import torch_world
from failures import PROMPT, mortals, outcomes, raised
from ringcomm import ArgumentError, PeerLost
from ringcomm.parallel import DataParallel, Grid, Pipeline
from ringcomm.parallel.schedule import BACKWARD, FORWARD, make_schedule, messages, simulate
from ringcomm.parallel.verify import pipeline_bytes, traffic

WIDTH, ROWS = 6, 2  # rows of a micro-batch
MICRO_BATCHES = 8
SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
schedules = pytest.mark.parametrize(("name", "chunks"), SHAPES)


class Residual(nn.Module):
    """A stage whose gradient is a sum of two, in an order that matters to its last bit."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        return x + self.inner(x)


def layers(count, dtype=torch.float64):
    torch.manual_seed(0)
    return [Residual(WIDTH).to(dtype) for _ in range(count)]


def batch(rows, step=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, WIDTH, generator=draw, dtype=dtype) for _ in range(2))


def one_by_one(model, inputs, targets, micro_batches):
    """Return the loss of a batch, and add to the gradients: what a pipeline must do."""
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = F.mse_loss(model(x), target) / micro_batches
        loss.backward()
        total += loss.detach()
    return total


def pipeline(name, chunks, micro_batches=MICRO_BATCHES, **options):
    """Return this rank's end of a pipeline over the world, and the whole model in one process."""
    grid = Grid(pp=dist.get_world_size())
    schedule = make_schedule(name, grid.pp.size, micro_batches, chunks)
    mine, whole = layers(schedule.stages), layers(schedule.stages)
    stages = [schedule.stage(grid.pp.rank, chunk) for chunk in range(chunks)]
    return Pipeline(grid, [mine[s] for s in stages], schedule, F.mse_loss, **options), stages, whole


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
    """Return the most outputs of stages that were alive at once, after a step in which layouts were agreed."""
    pipe, _, _ = pipeline(name, chunks)
    held = peak = 0

    def forward(*_):
        nonlocal held, peak
        held += 1
        peak = max(peak, held)

    def backward(*_):
        nonlocal held
        held -= 1

    for chunk in pipe.chunks:
        chunk.register_forward_hook(forward)
        chunk.register_full_backward_hook(backward)
    pipe.step(*batch(MICRO_BATCHES * ROWS))
    return peak


@schedules
def test_no_more_is_in_flight_than_simulated(name, chunks):
    peaks = simulate(make_schedule(name, 4, MICRO_BATCHES, chunks)).peaks
    assert tuple(torch_world.run(sizes_in_flight, 4, name, chunks)) == peaks


# --- What is sent -----------------------------------------------------------------------------------------------------


def counted(name, chunks, evaluates):
    """Return what this rank asks the backend for on the axis, call by call, in a second run."""
    pipe, _, _ = pipeline(name, chunks)
    run = pipe.evaluate if evaluates else pipe.step
    run(*batch(MICRO_BATCHES * ROWS))
    with traffic() as calls:
        run(*batch(MICRO_BATCHES * ROWS))
    assert {call.group for call in calls} == {pipe.axis.group.group_name}
    return [(call.operation, call.payload) for call in calls]


@schedules
@pytest.mark.parametrize("evaluates", [False, True])
def test_each_boundary_carries_each_micro_batch_once_each_way_and_nothing_else(name, chunks, evaluates):
    schedule = make_schedule(name, 4, MICRO_BATCHES, chunks)
    plan = schedule.forward_only() if evaluates else schedule
    size = ROWS * WIDTH * 8  # b · s · h of float64
    ways = [schedule.ends(message) for message in messages(plan)]
    assert len(ways) == (schedule.stages - 1) * MICRO_BATCHES * (1 if evaluates else 2)
    for rank, calls in enumerate(torch_world.run(counted, 4, name, chunks, evaluates)):
        expected = [
            ("send" if sender == rank else "recv", size) for sender, receiver in ways if rank in (sender, receiver)
        ]
        assert calls == [*expected, ("broadcast", 8)]  # the loss
        sends = [payload for call, payload in calls if call == "send"]
        mine = [schedule.stage(rank, chunk) for chunk in range(chunks)]
        boundaries = sum(stage < schedule.stages - 1 for stage in mine)
        boundaries += 0 if evaluates else sum(stage > 0 for stage in mine)
        assert sum(sends) == pipeline_bytes(boundaries, MICRO_BATCHES * ROWS, 1, WIDTH, 8)


def receives_ahead():
    """Return how many receives the last rank had begun, while it did each forward of an evaluation, for later ones."""
    pipe, _, _ = pipeline("gpipe", 1)
    ahead, begun, irecv = [], 0, dist.irecv

    def counting(*arguments, **options):
        nonlocal begun
        begun += 1
        return irecv(*arguments, **options)

    pipe.evaluate(*batch(MICRO_BATCHES * ROWS))
    pipe.chunks[0].register_forward_hook(lambda *_: ahead.append(begun - len(ahead) - 1))
    dist.irecv = counting
    try:
        pipe.evaluate(*batch(MICRO_BATCHES * ROWS))
    finally:
        dist.irecv = irecv
    return ahead


def test_receives_begin_early_but_no_more_of_them_than_there_are_ranks():
    assert torch_world.run(receives_ahead, 2)[-1] == [2] * (MICRO_BATCHES - 2) + [1, 0]


def other_shapes():
    pipe, stages, whole = pipeline("1f1b", 1)
    model = nn.Sequential(*whole)
    for rows in (ROWS, 3 * ROWS, ROWS):  # of a micro-batch
        for step in range(2):
            inputs, targets = batch(rows * MICRO_BATCHES, step)
            loss = pipe.step(inputs, targets)
            assert torch.equal(loss, one_by_one(model, inputs, targets, MICRO_BATCHES))
            with torch.no_grad():
                pieces = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
                expected = sum(F.mse_loss(model(x), y) / MICRO_BATCHES for x, y in pieces)
            assert torch.equal(pipe.evaluate(inputs, targets), expected)
    assert len(pipe._layouts) == 2  # agreed once for each
    return [parameter.grad is not None for parameter in pipe.chunks[0].parameters()], stages


def test_micro_batches_of_another_shape_are_agreed_anew_and_evaluated_between_steps():
    torch_world.run(other_shapes, 4)


def needless_values():
    pipe, _, whole = pipeline("1f1b", 1)
    inputs, targets = batch(MICRO_BATCHES * ROWS)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    loss = pipe.step(inputs if rank == 0 else inputs.to("meta"), targets if rank == last else targets.to("meta"))
    assert torch.equal(loss, one_by_one(nn.Sequential(*whole), inputs, targets, MICRO_BATCHES))


def test_values_matter_to_the_ends_only():
    torch_world.run(needless_values, 4)


def reduced_precision(dtype):
    grid = Grid(pp=2)
    stage = layers(2, dtype)[grid.pp.rank]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 2), F.mse_loss)
    loss = pipe.step(*batch(4, dtype=dtype))
    whole = layers(2, dtype)
    assert torch.equal(loss, one_by_one(nn.Sequential(*whole), *batch(4, dtype=dtype), 2))
    for mine, theirs in zip(stage.parameters(), whole[grid.pp.rank].parameters(), strict=True):
        assert mine.grad.dtype == dtype
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_pass_the_boundaries_too(dtype):
    torch_world.run(reduced_precision, 2, dtype)


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
        pipe.step(inputs.chunk(2)[grid.dp.rank], targets.chunk(2)[grid.dp.rank], scale)
    finally:
        dist.all_reduce = all_reduce
    assert sum(calls) == sum(parameter.numel() for module in modules for parameter in module.parameters())
    one_by_one(nn.Sequential(*whole), inputs, targets, 8)
    for module, stage in zip(modules, stages, strict=True):
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, scale * theirs.grad, rtol=1e-12, atol=1e-12)


@schedules
def test_replicas_average_once_for_all_micro_batches(name, chunks):
    torch_world.run(with_replicas, 4, name, chunks, 1024.0)


# --- What cannot be ---------------------------------------------------------------------------------------------------


def refusals():
    grid = Grid(pp=2)
    stage = layers(2)[grid.pp.rank]
    errors = [
        raised(ArgumentError, lambda: Pipeline(grid, [stage], make_schedule("1f1b", 4, 8), F.mse_loss)),
        raised(ArgumentError, lambda: Pipeline(grid, [stage], make_schedule("interleaved", 2, 4, 2), F.mse_loss)),
    ]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 4), F.mse_loss)
    errors.append(raised(ArgumentError, lambda: pipe.step(*batch(6))))
    errors.append(raised(ArgumentError, lambda: pipe.step(batch(4)[0], torch.tensor(1.0))))
    pipe.step(*batch(4))  # nothing was sent: it goes on
    return [str(error) for error in errors]


def test_what_does_not_fit_is_refused_with_the_numbers():
    for texts in torch_world.run(refusals, 2):
        assert texts[0] == "ranks of the schedule: expected those of the pipeline, 2, got 4"
        assert texts[1] == "chunks of this rank: expected those of the schedule, 2, got 1"
        assert texts[2] == "rows of the inputs, for 4 micro-batches: expected a multiple of 4, got 6"
        assert texts[3] == "rows of the targets, for 4 micro-batches: expected a multiple of 4, got 0"


class Wrong(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.kind == "integers":
            return x.long()
        if self.kind == "another shape":
            return x[: self.calls]
        return torch.zeros_like(x).requires_grad_()


def wrong_stages(kind):
    grid = Grid(pp=2)
    module = Wrong(kind) if grid.pp.rank == (kind == "a constant") else nn.Identity()
    pipe = Pipeline(grid, [module], make_schedule("gpipe", 2, 2), F.mse_loss)
    if grid.pp.rank == (kind == "a constant"):
        return str(raised(ArgumentError, lambda: pipe.step(*batch(4))))
    with pytest.raises(Exception, match="rank"):
        pipe.step(*batch(4))
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("integers", "what stage 0 returns: expected at most 8 dimensions of one of .*, got torch.int64 of shape"),
        (
            "another shape",
            "of the same shape: expected torch.float64 of shape .1, 6., got torch.float64 of shape .2, 6.",
        ),
        ("a constant", "stage 1: what it returns does not depend on what it is given"),
    ],
)
def test_a_stage_that_returns_what_cannot_be_sent_is_named(kind, words):
    with mortals(2) as pool:
        answers = {}
        for rank, answer, _ in outcomes(pool, torch_world.within, "ringcomm", 2.0, wrong_stages, (kind,)):
            answers[rank] = answer
    (text,) = filter(None, answers.values())
    assert re.search(words, text)


# --- A rank that dies -------------------------------------------------------------------------------------------------


class Mortal(nn.Module):
    """A stage that kills its process."""

    def __init__(self, inner, after):
        super().__init__()
        self.inner, self.left = inner, after

    def forward(self, x):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.inner(x)


def killed(name, chunks, victim, after):
    pipe, _, _ = pipeline(name, chunks)
    if dist.get_rank() == victim:
        pipe.chunks[-1] = Mortal(pipe.chunks[-1], after)
    started = time.monotonic()
    error = raised(PeerLost, lambda: [pipe.step(*batch(MICRO_BATCHES * ROWS)) for _ in range(2)])
    return str(error), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks", "victim", "after"),
    [("gpipe", 1, 0, 2), ("1f1b", 1, 1, 0), ("1f1b", 1, 2, MICRO_BATCHES + 3), ("interleaved", 2, 3, 5)],
)
def test_a_rank_that_dies_in_a_pipeline_is_named_on_every_other(name, chunks, victim, after):
    with mortals(4) as pool:
        arguments = (name, chunks, victim, after)
        answers = {
            rank: answer for rank, answer, _ in outcomes(pool, torch_world.within, "ringcomm", 20.0, killed, arguments)
        }
    assert isinstance(answers.pop(victim), ConnectionError)
    assert len(answers) == 3
    for text, seconds in answers.values():
        assert f"rank {victim} (process" in text
        assert "died" in text
        assert seconds < PROMPT
