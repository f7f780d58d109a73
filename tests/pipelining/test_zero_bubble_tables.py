"""Zero-bubble schedules: the figures of the paper."""

from dataclasses import replace

import pytest
from test_schedule import changed, swapped

from ringcomm import ArgumentError
from ringcomm.pipelining import zero_bubble
from ringcomm.pipelining.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, make_schedule
from ringcomm.pipelining.simulation import simulate, validate

RANKS = (1, 2, 3, 4, 8)


def drawn(schedule):
    """Return the rows of a simulated schedule as the docstring draws them; a phase takes one unit."""
    letters = {FORWARD: "F", BACKWARD_INPUT: "B", BACKWARD_WEIGHT: "W"}
    lines = []
    for rank, row in enumerate(simulate(schedule).spans):
        cells = ["."] * int(row[-1].end)
        for action, begin, _ in row:
            cells[int(begin)] = letters[action.phase] + str(action.chunk) * (schedule.chunks > 1)
        lines.append(f"    rank {rank}  " + " ".join(cell.ljust(schedule.chunks) for cell in cells).rstrip() + "\n")
    return "".join(lines)


def test_the_docstring_draws_the_schedules():
    assert drawn(make_schedule("zb-h1", 3, 4)) in zero_bubble.__doc__
    assert drawn(make_schedule("zbv", 2, 4)) in zero_bubble.__doc__


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_and_no_more_live_micro_batches(p):
    for m in (1, 2, p, 2 * p, 3 * p + 1):
        schedule, one_f_one_b = make_schedule("zb-h1", p, m), make_schedule("1f1b", p, m)
        validate(schedule)
        timeline, plain = simulate(schedule, 1, 2), simulate(one_f_one_b, 1, 2)
        assert timeline.peaks == (min(p, m),) * p
        assert max(timeline.peaks) == max(plain.peaks)
        assert timeline.makespan == 3 * m + max(p - 1, 2 * p - 1 - m)
        if m >= p:
            assert timeline.bubble == (p - 1) / (3 * m) == pytest.approx(plain.bubble / 3)
            for rank, row in enumerate(timeline.spans):
                idle = [span.begin - before for before, span in zip([0, *(x.end for x in row)], row, strict=False)]
                assert sum(idle) == p - 1
                assert idle[0] == rank
                assert idle[p - rank] == p - 1 - rank  # before the first backward


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (2, 2, 1), (2, 3, 2), (4, 3, 1)])
def test_the_bubble_of_zb_h1_is_that_of_the_paper_also_for_unequal_times(forward, inputs, weights):
    for p in RANKS:
        for m in (p, 2 * p, 3 * p + 1):
            for name, bubble in (("zb-h1", forward + inputs - weights), ("1f1b", forward + inputs + weights)):
                makespan = simulate(make_schedule(name, p, m), forward, inputs + weights, weights).makespan
                assert makespan == m * (forward + inputs + weights) + (p - 1) * bubble


@pytest.mark.parametrize("p", RANKS)
def test_no_rank_of_zbv_waits_between_its_first_and_its_last_action(p):
    """The paper's cost of a schedule is the longest time from the first to the last action of a rank."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        timeline = simulate(make_schedule("zbv", p, m), 1, 2)
        validate(timeline.schedule)
        assert [row[0].begin for row in timeline.spans] == [*range(p)]
        assert {row[-1].end - row[0].begin for row in timeline.spans} == {6 * m}
        assert timeline.makespan == 6 * m + p - 1
        assert timeline.bubble == pytest.approx((p - 1) / (6 * m))
        assert timeline.peaks == (2 * p,) * p


def test_fewer_micro_batches_fill_less_of_zbv():
    for p in RANKS:
        for m in range(1, 2 * p - 1):
            validate(make_schedule("zbv", p, m))
            assert max(simulate(make_schedule("zbv", p, m)).peaks) <= 2 * p


def test_the_stages_of_zbv_run_down_the_ranks_and_up_again():
    schedule = make_schedule("zbv", 4, 8)
    assert [[schedule.stage(rank, chunk) for rank in range(4)] for chunk in range(2)] == [[0, 1, 2, 3], [7, 6, 5, 4]]
    assert [schedule.rank(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


ZB = make_schedule("zb-h1", 2, 2)  # rank 0: F F B W B W, rank 1: F B F B W W


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (changed(ZB, 0, swapped(2, 3)), "backward for weights of micro-batch 0 .* before its backward for inputs"),
        (changed(ZB, 1, swapped(0, 1)), "backward for inputs of micro-batch 0 .* before its forward"),
        (changed(ZB, 1, swapped(4, 5)), r"backwards by chunk 0: expected the order .* got \[1, 0\]"),
        (changed(ZB, 0, lambda row: row[:-1]), "backward for weights of micro-batch 1 .* expected 1 times, got 0"),
        (changed(ZB, 0, lambda row: [*row, Action(BACKWARD, 0)]), "backward of micro-batch 0 .* 0 times, got 1"),
        (replace(make_schedule("zbv", 2, 3), v_shaped=False), "the ranks deadlock"),
    ],
)
def test_split_schedules_that_do_not_train_are_refused(schedule, words):
    with pytest.raises(ArgumentError, match=words):
        validate(schedule)
