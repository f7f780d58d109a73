"""Pipeline schedules: the figures of the papers, and invalid schedules. test_pipeline.py runs them."""

import subprocess
import sys
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest

from ringcomm import ArgumentError
from ringcomm.commands.cli import main
from ringcomm.pipelining.schedule import BACKWARD, FORWARD, SCHEDULES, Action, P2PTransfer, make_schedule
from ringcomm.pipelining.simulation import simulate, transfers, validate

RANKS = (1, 2, 3, 4, 8)
FLAT = [make_schedule(name, p, m) for name in ("gpipe", "1f1b") for p in RANKS for m in (1, 2, 3, 8, 17)]
DEEP = [make_schedule("interleaved", p, p * turns, v) for p in RANKS for turns in (1, 2, 5) for v in (2, 3, 4)]
GPIPE, ONE_F_ONE_B = make_schedule("gpipe", 2, 2), make_schedule("1f1b", 2, 2)
SPLIT = [make_schedule(name, p, m) for name in ("zb-h1", "zbv") for p in RANKS for m in (1, 2, 3, 8, 17)]


def for_each(schedules):
    """Make a test of a function of one schedule."""

    assert schedules

    def test_of(check):
        def test():
            for schedule in schedules:
                try:
                    check(schedule)
                except BaseException as error:
                    error.add_note(f"with {schedule}")
                    raise

        return test

    return test_of


every = for_each(FLAT + DEEP + SPLIT)
both_ways = for_each([each for one in FLAT + DEEP + SPLIT for each in (one, one.forward_only())])


@for_each(FLAT + DEEP)
def test_every_schedule_trains_with_the_bubble_and_the_activations_of_the_docstring(schedule):
    validate(schedule)
    p, m, v = schedule.ranks, schedule.micro_batches, schedule.chunks
    most = {"gpipe": lambda r: m, "1f1b": lambda r: p - r, "interleaved": lambda r: (v + 1) * p - 2 * r - 1}
    for costs in ((1, 1), (1, 2), (3, 1)):
        assert simulate(schedule, *costs).bubble == (p - 1) / (v * m)
    assert simulate(schedule).peaks == tuple(min(most[schedule.name](rank), m * v) for rank in range(p))


def test_four_ranks_take_33_units_for_eight_micro_batches_of_three():
    """GPipe and 1F1B; without overlap, 96."""
    for schedule in (make_schedule("gpipe", 4, 8), make_schedule("1f1b", 4, 8)):
        assert simulate(schedule, forward=1, backward=2).makespan == 33
        assert sum(end - begin for row in simulate(schedule).spans for _, begin, end in row) == 96


@every
def test_a_rank_runs_one_action_at_a_time_and_none_before_its_input_arrives(schedule):
    timeline = simulate(schedule, 2, 3)
    ends = {schedule.output_of(rank, action): end for rank, row in enumerate(timeline.spans) for action, _, end in row}
    for rank, row in enumerate(timeline.spans):
        assert [action for action, _, _ in row] == [*schedule.table[rank]]
        for before, after in pairwise(row):
            assert before.end <= after.begin
        for action, begin, _ in row:
            if (needed := schedule.input_of(rank, action)) is not None:
                assert ends[needed] <= begin


def test_1f1b_of_two_ranks_in_full():
    f, b = (lambda i: Action(FORWARD, i)), (lambda i: Action(BACKWARD, i))
    assert make_schedule("1f1b", 2, 3).table == (
        (f(0), f(1), b(0), f(2), b(1), b(2)),
        (f(0), b(0), f(1), b(1), f(2), b(2)),
    )


def test_interleaved_chunks_take_turns():
    """As in figure 4 of the paper: four by chunk 0, the same four by chunk 1, and the next four."""
    forwards = [(i, c) for work, i, c in make_schedule("interleaved", 4, 8, 2).table[0] if work == FORWARD]
    assert forwards == [(first + i, c) for first in (0, 4) for c in (0, 1) for i in range(4)]


# --- Transfers --------------------------------------------------------------------------------------------------------


@both_ways
def test_each_micro_batch_crosses_each_boundary_between_ranks_once_in_each_direction(schedule):
    phases = (FORWARD,) if "forward only" in schedule.name else (FORWARD, BACKWARD)
    boundaries = [s for s in range(schedule.stages - 1) if schedule.rank(s) != schedule.rank(s + 1)]
    found = transfers(schedule)
    expected = {P2PTransfer(w, i, s) for w in phases for i in range(schedule.micro_batches) for s in boundaries}
    assert len(found) == len(expected)
    assert {*found} == expected


@both_ways
def test_no_rank_waits_forever_even_if_transfers_run_one_by_one(schedule):
    """As with NCCL: sends are unbuffered, and a rank completes a transfer before its next one starts."""
    order = transfers(schedule)
    streams = [deque(m for m in order if rank in schedule.endpoints(m)) for rank in range(schedule.ranks)]
    rows = [deque(row) for row in schedule.table]
    arrived, made = {None}, set()
    for _ in range(2 * len(order) + sum(map(len, rows))):
        for rank, row in enumerate(rows):
            while row and schedule.input_of(rank, row[0]) in arrived:
                given = schedule.output_of(rank, row.popleft())
                made.add(given)
                if given and len({*schedule.endpoints(given)}) == 1:
                    arrived.add(given)
        for stream in streams:
            ends = schedule.endpoints(stream[0]) if stream and stream[0] in made else ()
            if ends and all(streams[end][0] == stream[0] for end in ends):
                arrived.add(stream[0])
                for end in ends:
                    streams[end].popleft()
    assert not any(rows)
    assert not any(streams)


# --- Invalid schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1c", 2, 2), "unknown schedule '1f1c'; did you mean '1f1b'?"),
        (("gpipe", 0, 2), "ranks: expected an integer from 1 .*, got 0"),
        (("1f1b", 2, 0), "micro-batches: expected an integer from 1 .*, got 0"),
        (("1f1b", 2, 2.5), "micro-batches: expected an integer, got 2.5"),
        (("1f1b", 2, 2, 2), "chunks of 1f1b: expected 1 per rank, got 2"),
        (("interleaved", 4, 6, 2), "micro-batches of interleaved: expected a multiple of pp = 4, got 6"),
        (("interleaved", 4, 8, 1), "chunks of interleaved: expected at least 2 per rank, got 1"),
        (("zb-h1", 4, 8, 2), "chunks of zb-h1: expected 1 per rank, got 2"),
        (("zbv", 4, 8, 1), "chunks of zbv: expected 2 per rank, got 1"),
        (("zbv", 4, 8, 3), "chunks of zbv: expected 2 per rank, got 3"),
        (("interleaved", 4, 0, 2), "micro-batches: expected an integer from 1 .*, got 0"),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        make_schedule(*arguments)


def changed(schedule, rank, change):
    row = change(list(schedule.table[rank]))
    return replace(schedule, table=(*schedule.table[:rank], tuple(row), *schedule.table[rank + 1 :]))


def swapped(a, b):
    def change(row):
        row[a], row[b] = row[b], row[a]
        return row

    return change


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (changed(GPIPE, 1, lambda row: row[1:]), "rank 1: forward of micro-batch 0 .* expected 1 times, got 0"),
        (changed(GPIPE, 0, lambda row: [*row, row[-1]]), "backward of micro-batch 1 .* expected 1 times, got 2"),
        (changed(GPIPE, 0, lambda row: [*row, Action(FORWARD, 2)]), "micro-batch 2 .* expected 0 times, got 1"),
        (changed(GPIPE, 0, swapped(2, 3)), "backwards by chunk 0: expected the order .* got .1, 0."),
        (changed(ONE_F_ONE_B, 1, swapped(0, 1)), "rank 1: backward .* 0 .* comes before its forward"),
        (replace(GPIPE, ranks=3), "a row for each of 3 ranks, got 2"),
        # Rank 0 waits for a gradient, rank 1 for a forward after it.
        (
            changed(GPIPE, 0, swapped(1, 2)),
            "(?s)gpipe: the ranks deadlock\nrank 0: backward of micro-batch 0 by chunk 0 waits for P2PTransfer.*"
            "\nrank 1: forward of micro-batch 1 by chunk 0 waits for P2PTransfer",
        ),
    ],
)
def test_schedules_that_do_not_train_are_refused(schedule, words):
    with pytest.raises(ArgumentError, match=words):
        validate(schedule)


def test_a_schedule_with_less_overlap_is_valid():
    validate(changed(ONE_F_ONE_B, 0, swapped(1, 2)))


def test_times_must_be_positive():
    with pytest.raises(ArgumentError, match=r"more than 0, got \(0, 1\)"):
        simulate(make_schedule("gpipe", 1, 1), 0, 1)
    with pytest.raises(ArgumentError, match="backward for weights: expected more than 0 and less than 2, got 2"):
        simulate(make_schedule("zb-h1", 1, 1), 1, 2, 2)


# --- Drawn ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_with_its_figures(name, tmp_path):
    file = tmp_path / "x.svg"
    assert main(["draw", name, "-p", "4", "-m", "8", "-o", str(file)]) == 0
    text = file.read_text()
    makespan, bubble = {
        "gpipe": (33, "37.5"),
        "1f1b": (33, "37.5"),
        "interleaved": (57, "18.8"),
        "zb-h1": (27, "12.5"),
        "zbv": (51, "6.2"),
    }[name]
    assert f"{makespan} units of time, a bubble of {bubble}%" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1f1b", "--collective", "barrier"], "1f1b is a pipeline schedule, which takes no --collective"),
        (["ring", "-m", "8"], "ring is an algorithm, which takes no -m"),
        (["gpipe", "-p", "8", "-m", "400"], "the picture: expected at most 400 units of time, got 1221"),
        (["interleaved", "-p", "4", "-m", "6"], "micro-batches of interleaved: expected a multiple of pp = 4"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused(arguments, words, tmp_path, capsys):
    assert main(["draw", *arguments, "-o", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err.startswith(f"ringcomm draw: {words}")


@pytest.mark.slow
def test_schedules_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import ringcomm.commands.cli, ringcomm.pipelining.schedule"
    subprocess.run([sys.executable, "-c", code], check=True)
