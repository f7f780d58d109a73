"""What passes between the stages of a pipeline: which messages, of what, and when they begin."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

import torch_world
from pipelines import MICRO_BATCHES, ROWS, WIDTH, batch, layers, one_by_one, pipeline, schedules
from ringcomm.parallel import Grid, Pipeline
from ringcomm.parallel.schedule import make_schedule, messages
from ringcomm.parallel.verify import pipeline_bytes, traffic


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


class Noted:
    """A work that knows whether somebody has waited for it."""

    def __init__(self, work):
        self.work, self.awaited = work, False

    def wait(self):
        self.work.wait()
        self.awaited = True


def sends_awaited(name, chunks):
    """Return for each send of a step whether it had been waited for in the end."""
    pipe, _, _ = pipeline(name, chunks)
    works, isend = [], dist.isend

    def noted(*arguments, **options):
        works.append(Noted(isend(*arguments, **options)))
        return works[-1]

    dist.isend = noted
    try:
        pipe.step(*batch(MICRO_BATCHES * ROWS))
    finally:
        dist.isend = isend
    return [work.awaited for work in works]


@schedules
def test_a_step_ends_when_all_has_been_sent(name, chunks):
    for awaited in torch_world.run(sends_awaited, 2, name, chunks):
        assert len(awaited) >= MICRO_BATCHES * (2 * chunks - 1)  # and letters
        assert all(awaited)


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
    assert len(pipe._formats) == 2  # agreed once for each
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
