"""Transfers between pipeline stages: which, of what size, and when they start."""

from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from cases.pipelines import MICRO_BATCHES, ROWS, SHAPES, WIDTH, batch, layers, one_by_one, pipeline, schedules
from harness import torch_world
from harness.failures import raised
from ringcomm import Aborted, ArgumentError
from ringcomm.parallel import Grid, Pipeline
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.pipeline.p2p import P2PCommunicator, TensorMeta
from ringcomm.pipelining.schedule import SCHEDULES, make_schedule
from ringcomm.pipelining.simulation import transfers
from ringcomm.torch.traffic import record_traffic


def counted(name, chunks, evaluates):
    """Return this rank's calls on the backend in a second run."""
    pipe, _, _ = pipeline(name, chunks)
    run = pipe.evaluate if evaluates else pipe.step
    run(*batch(MICRO_BATCHES * ROWS))
    with record_traffic() as calls:
        run(*batch(MICRO_BATCHES * ROWS))
    assert {call.group for call in calls} == {pipe.axis.group.group_name}
    return [(call.operation, call.payload) for call in calls]


@schedules
@pytest.mark.parametrize("evaluates", [False, True])
def test_the_backend_runs_exactly_the_transfers_of_the_schedule(name, chunks, evaluates):
    schedule = make_schedule(name, 4, MICRO_BATCHES, chunks)
    plan = schedule.forward_only() if evaluates else schedule
    size = ROWS * WIDTH * 8  # b · s · h of float64
    ends = [schedule.endpoints(transfer) for transfer in transfers(plan)]
    assert len(ends) == (schedule.stages - 1) * MICRO_BATCHES * (1 if evaluates else 2)
    for rank, calls in enumerate(torch_world.run(counted, 4, name, chunks, evaluates)):
        expected = [
            ("send" if sender == rank else "recv", size) for sender, receiver in ends if rank in (sender, receiver)
        ]
        assert calls == [*expected, ("broadcast", 16 if evaluates else 8)]  # the loss; evaluated, and what it counts
        sends = [payload for call, payload in calls if call == "send"]
        mine = [schedule.stage(rank, chunk) for chunk in range(chunks)]
        boundaries = sum(stage < schedule.stages - 1 for stage in mine)
        boundaries += 0 if evaluates else sum(stage > 0 for stage in mine)
        assert sends == [size] * boundaries * MICRO_BATCHES


def most_outstanding(schedule, rank):
    """Return the most receives and sends that a rank has outstanding, given a backend that does nothing."""
    axis = Axis("pp", schedule.ranks, rank, tuple(range(schedule.ranks)), None)
    order = [each for each in transfers(schedule) if rank in schedule.endpoints(each)]
    metadata = dict.fromkeys(range(schedule.stages), TensorMeta(torch.float32, (1,)))
    receives = sends = 0
    with patch.object(dist, "irecv"), patch.object(dist, "isend"):
        p2p = P2PCommunicator(axis, schedule, order, metadata, torch.device("cpu"))
        post = p2p._post_recv

        def counted():
            nonlocal receives
            post()
            receives = max(receives, len(p2p._receives))

        p2p._post_recv, receives = counted, len(p2p._receives)
        for action in schedule.table[rank]:
            if source := schedule.input_of(rank, action):
                p2p.recv(source)
            if destination := schedule.output_of(rank, action):
                p2p.send(destination, torch.zeros(1))
                sends = max(sends, len(p2p._sends))
    return receives, sends


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", range(2, 7))
def test_as_many_receives_are_outstanding_as_ranks_and_one_more_on_two_ranks_of_interleaved(name, ranks):
    schedules = [make_schedule(name, ranks, times * ranks) for times in (1, 2, 3)]
    found = [most_outstanding(schedule, rank) for schedule in schedules for rank in range(ranks)]
    assert max(receives for receives, _ in found) == ranks + (name == "interleaved" and ranks == 2)
    assert max(sends for _, sends in found) <= ranks


@torch_world.on(2)
@torch_world.each("name, chunks", SHAPES)
def test_a_step_waits_for_all_sends(name, chunks):
    pipe, _, _ = pipeline(name, chunks)
    works, isend = [], dist.isend

    def recorded(*arguments, **options):
        works.append(Mock(wraps=isend(*arguments, **options)))
        return works[-1]

    with patch.object(dist, "isend", recorded):
        pipe.step(*batch(MICRO_BATCHES * ROWS))
    sends, unfinished = len(works), sum(not work.wait.called for work in works)
    assert sends == MICRO_BATCHES * (2 * chunks - 1)
    assert unfinished == 0


@torch_world.on(4)
def test_micro_batches_may_change_shape_and_evaluations_may_alternate_with_steps():
    pipe, _, whole = pipeline("1f1b", 1)
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
    assert len(pipe._metadata) == 2  # exchanged once for each


@torch_world.on(4)
def test_only_the_ends_read_inputs_and_targets():
    pipe, _, whole = pipeline("1f1b", 1)
    inputs, targets = batch(MICRO_BATCHES * ROWS)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    loss = pipe.step(inputs if rank == 0 else inputs.to("meta"), targets if rank == last else targets.to("meta"))
    assert torch.equal(loss, one_by_one(nn.Sequential(*whole), inputs, targets, MICRO_BATCHES))


class Embedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids.long())


@torch_world.on(2, backends=torch_world.BACKENDS)
def test_only_the_first_stage_knows_the_dtype_of_inputs_which_may_change():
    grid, losses = Grid(pp=2), []
    stage = [Embedding(8, 4), nn.Linear(4, 2)][grid.pp.rank]
    pipe = Pipeline(grid, stage, make_schedule("1f1b", 2, 2), F.mse_loss)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = torch.ones(4, 3, dtype=dtype) if grid.pp.rank == 0 else torch.empty(4, 3, device="meta")
        losses.append(float(pipe.step(x, torch.ones(4, 3, 2))))
    assert len({*losses}) == 1


@torch_world.on(2)
def test_another_dtype_at_a_boundary_is_refused_on_all_ranks():
    grid = Grid(pp=2)
    stage = [nn.Identity(), nn.Linear(4, 2).double()][grid.pp.rank]
    pipe = Pipeline(grid, stage, make_schedule("1f1b", 2, 2), lambda x, y: F.mse_loss(x.double(), y))
    pipe.evaluate(torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))
    x, y = torch.ones(4, 4), torch.ones(4, 2, dtype=torch.float64)
    error = raised(ArgumentError if grid.pp.rank == 0 else Aborted, lambda: pipe.evaluate(x, y))
    assert "output of stage 0 for micro-batches of the same shape: expected torch.float64 of shape (2, 4)" in str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch_world.on(2)
def test_other_dtypes_cross_boundaries(dtype):
    grid = Grid(pp=2)
    stage = layers(2, dtype)[grid.pp.rank]
    pipe = Pipeline(grid, [stage], make_schedule("1f1b", 2, 2), F.mse_loss)
    loss = pipe.step(*batch(4, dtype=dtype))
    whole = layers(2, dtype)
    assert torch.equal(loss, one_by_one(nn.Sequential(*whole), *batch(4, dtype=dtype), 2))
    for mine, theirs in zip(stage.parameters(), whole[grid.pp.rank].parameters(), strict=True):
        assert mine.grad.dtype == dtype
        assert torch.equal(mine.grad, theirs.grad)
