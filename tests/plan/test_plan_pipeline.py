"""The closed forms of pipelines against the tables that `Pipeline` executes."""

import random

import pytest

from ringcomm.pipelining import BACKWARD, FORWARD, make_schedule, simulate, timeline
from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.price.pipeline import pipeline_seconds

SHAPES = [(1, 4, 1), (2, 1, 1), (4, 2, 1), (4, 9, 1), (8, 24, 1), (2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)]


def schedule_of(p, m, v):
    return make_schedule(ParallelLayout(pp=p, chunks=v).schedule, p, m, v)


def run_schedule(schedule, forward, backward, extra_forward=0, extra_backward=0, transfer=0):
    """Return the times of all actions; the last stage takes longer."""
    times = {FORWARD: (forward, extra_forward), BACKWARD: (backward, extra_backward)}
    last = schedule.stages - 1
    return timeline(schedule, lambda stage, phase: times[phase][0] + (stage == last) * times[phase][1], transfer)


@pytest.mark.parametrize(("p", "m", "v"), SHAPES)
def test_the_bubble_is_that_of_narayanan_et_al(p, m, v):
    time = pipeline_seconds(p, m, v, stage=3.0, extra=0.0, transfer=0.0)
    assert time / (3 * m) - 1 == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), SHAPES)
def test_a_run_without_transfers_is_the_simulation_of_the_schedule(p, m, v):
    assert run_schedule(schedule_of(p, m, v), 1, 2).spans == simulate(schedule_of(p, m, v), 1, 2).spans


@pytest.mark.parametrize("longest", [0.0, 0.1, 0.5])
def test_the_closed_forms_equal_runs_of_the_table(longest):
    """For any times with 1F1B; with transfers up to a tenth of a chunk's time when interleaved."""
    draw = random.Random(0)
    for _ in range(300):
        p, v = draw.randint(1, 8), draw.choice([1, 1, 2, 3, 4])
        if p == 1 or longest > 0.1:
            v = 1
        m = draw.randint(1, 20) if v == 1 else p * draw.randint(1, 4)
        forward, backward = draw.uniform(1, 2), draw.uniform(1, 4)
        extra = [draw.choice([0, draw.uniform(0, 1)]) * each for each in (forward, backward)]
        transfer = draw.uniform(0, longest) * (forward + backward)
        ran = run_schedule(schedule_of(p, m, v), forward, backward, *extra, transfer).makespan
        assert pipeline_seconds(p, m, v, v * (forward + backward), sum(extra), transfer) == pytest.approx(ran)


def test_long_transfers_of_an_interleaved_schedule_take_longer_than_the_closed_form_says():
    ran = run_schedule(schedule_of(8, 16, 4), 1, 2, transfer=3).makespan
    assert pipeline_seconds(8, 16, 4, 12, 0, 3) < ran


def test_chunks_of_one_rank_need_no_transfer():
    schedule = make_schedule("1f1b", 1, 3, 1)
    assert run_schedule(schedule, 1, 2, transfer=5).makespan == pipeline_seconds(1, 3, 1, 3, 0, 5) == 9
