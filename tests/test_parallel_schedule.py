"""Pipeline schedules: the numbers of the papers, and what is no schedule. test_parallel_pipeline.py runs them."""

import subprocess
import sys
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest

from ringcomm import ArgumentError
from ringcomm.cli import main
from ringcomm.parallel.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Action,
    Message,
    gpipe,
    interleaved,
    make_schedule,
    messages,
    one_forward_one_backward,
    simulate,
    validate,
)

RANKS = (1, 2, 3, 4, 8)
FLAT = [make_schedule(name, p, m) for name in ("gpipe", "1f1b") for p in RANKS for m in (1, 2, 3, 8, 17)]
DEEP = [interleaved(p, p * turns, v) for p in RANKS for turns in (1, 2, 5) for v in (2, 3, 4)]
every = pytest.mark.parametrize(
    "schedule", FLAT + DEEP, ids=lambda s: f"{s.name}-{s.ranks}-{s.micro_batches}-{s.chunks}"
)


@every
def test_every_schedule_trains(schedule):
    validate(schedule)


@every
@pytest.mark.parametrize("costs", [(1, 1), (1, 2), (3, 1)])
def test_the_bubble_is_that_of_the_papers(schedule, costs):
    p, m, v = schedule.ranks, schedule.micro_batches, schedule.chunks
    assert simulate(schedule, *costs).bubble == (p - 1) / (v * m)


def test_four_ranks_take_33_units_for_eight_micro_batches_of_three():
    """GPipe, and 1F1B; one after the other the stages would take 96."""
    for schedule in (gpipe(4, 8), one_forward_one_backward(4, 8)):
        assert simulate(schedule, forward=1, backward=2).makespan == 33
        assert sum(end - begin for row in simulate(schedule).spans for _, begin, end in row) == 96


@every
def test_no_more_is_in_flight_than_the_table_of_the_docstring_says(schedule):
    p, m, v = schedule.ranks, schedule.micro_batches, schedule.chunks
    most = {"gpipe": lambda r: m, "1f1b": lambda r: p - r, "interleaved": lambda r: (v + 1) * p - 2 * r - 1}
    assert simulate(schedule).peaks == tuple(min(most[schedule.name](rank), m * v) for rank in range(p))


@every
def test_a_rank_does_one_thing_at_a_time_and_nothing_before_it_has_what_it_needs(schedule):
    timeline = simulate(schedule, 2, 3)
    ends = {schedule.gives(rank, action): end for rank, row in enumerate(timeline.spans) for action, _, end in row}
    for rank, row in enumerate(timeline.spans):
        assert [action for action, _, _ in row] == [*schedule.table[rank]]
        for before, after in pairwise(row):
            assert before.end <= after.begin
        for action, begin, _ in row:
            if (needed := schedule.needs(rank, action)) is not None:
                assert ends[needed] <= begin


def test_one_forward_one_backward_written_out():
    f, b = (lambda i: Action(FORWARD, i)), (lambda i: Action(BACKWARD, i))
    assert one_forward_one_backward(2, 3).table == (
        (f(0), f(1), b(0), f(2), b(1), b(2)),
        (f(0), b(0), f(1), b(1), f(2), b(2)),
    )


def test_chunks_take_micro_batches_by_turns():
    """As in figure 4 of the paper: four by chunk 0, the same four by chunk 1, and the next four."""
    forwards = [(i, c) for work, i, c in interleaved(4, 8, 2).table[0] if work == FORWARD]
    assert forwards == [(first + i, c) for first in (0, 4) for c in (0, 1) for i in range(4)]


# --- Messages ---------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_boundary_between_two_ranks_is_passed_once_by_each_micro_batch_each_way(schedule, forward_only):
    if forward_only:
        schedule = schedule.forward_only()
    works = (FORWARD,) if forward_only else (FORWARD, BACKWARD)
    boundaries = range(schedule.stages - 1) if schedule.ranks > 1 else ()
    found = messages(schedule)
    expected = {Message(w, i, s) for w in works for i in range(schedule.micro_batches) for s in boundaries}
    assert len(found) == len(expected)
    assert {*found} == expected


@every
@pytest.mark.parametrize("forward_only", [False, True])
def test_nobody_waits_for_ever_even_where_a_rank_sends_and_receives_one_by_one(schedule, forward_only):
    """As with NCCL: nothing is buffered, and whatever a rank has begun must end before its next message moves."""
    if forward_only:
        schedule = schedule.forward_only()
    order = messages(schedule)
    streams = [deque(m for m in order if rank in schedule.ends(m)) for rank in range(schedule.ranks)]
    rows = [deque(row) for row in schedule.table]
    arrived, made = {None}, set()
    for _ in range(2 * len(order) + sum(map(len, rows))):
        for rank, row in enumerate(rows):
            while row and schedule.needs(rank, row[0]) in arrived:
                given = schedule.gives(rank, row.popleft())
                made.add(given)
                if given and len({*schedule.ends(given)}) == 1:
                    arrived.add(given)
        for stream in streams:
            if stream and stream[0] in made and all(streams[end][0] == stream[0] for end in schedule.ends(stream[0])):
                message = stream[0]
                for end in schedule.ends(message):
                    streams[end].popleft()
                arrived.add(message)
    assert not any(rows)
    assert not any(streams)


# --- What is no schedule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1c", 2, 2), "unknown schedule '1f1c'; did you mean '1f1b'?"),
        (("gpipe", 0, 2), "ranks: expected an integer from 1 .*, got 0"),
        (("1f1b", 2, 0), "micro-batches: expected an integer from 1 .*, got 0"),
        (("1f1b", 2, 2.5), "micro-batches: expected an integer, got 2.5"),
        (("1f1b", 2, 2, 2), "chunks of 1f1b: expected 1 for each rank .*, got 2"),
        (("interleaved", 4, 6, 2), "over 4 ranks: expected a multiple of 4, got 6"),
        (("interleaved", 4, 8, 1), "chunks of the interleaved schedule: expected 2 or more .*, got 1"),
        (("interleaved", 4, 0, 2), "micro-batches: expected an integer from 1 .*, got 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(arguments, words):
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
        (changed(gpipe(2, 2), 1, lambda row: row[1:]), "rank 1: forward of micro-batch 0 .* expected 1 times, got 0"),
        (changed(gpipe(2, 2), 0, lambda row: [*row, row[-1]]), "backward of micro-batch 1 .* expected 1 times, got 2"),
        (changed(gpipe(2, 2), 0, lambda row: [*row, Action(FORWARD, 2)]), "micro-batch 2 .* expected 0 times, got 1"),
        (changed(gpipe(2, 2), 0, swapped(2, 3)), "next backward by chunk 0: expected micro-batch 0, got 1"),
        (
            changed(one_forward_one_backward(2, 2), 1, swapped(0, 1)),
            "rank 1: backward .* 0 .* comes before its forward",
        ),
        (replace(gpipe(2, 2), ranks=3), "a row for each of 3 ranks, got 2"),
        (changed(one_forward_one_backward(2, 2), 0, swapped(1, 2)), None),
        # Rank 0 waits for a gradient, rank 1 for the forward that comes after it.
        (changed(gpipe(2, 2), 0, lambda row: [row[0], row[2], row[1], row[3]]), "wait for each other"),
    ],
)
def test_what_does_not_train_is_refused_in_words(schedule, words):
    if words is None:
        validate(schedule)  # less overlap, the same result
        return
    with pytest.raises(ArgumentError, match=words):
        validate(schedule)


def test_ranks_that_wait_for_each_other_are_told_with_what_they_wait_for():
    late = changed(gpipe(2, 2), 0, lambda row: [row[0], row[2], row[1], row[3]])
    with pytest.raises(ArgumentError) as refused:
        simulate(late)
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("rank 0: backward of micro-batch 0 by chunk 0 waits for Message(")
    assert lines[2].startswith("rank 1: forward of micro-batch 1 by chunk 0 waits for Message(")


def test_time_does_not_stand_still():
    with pytest.raises(ArgumentError, match=r"more than 0, got \(0, 1\)"):
        simulate(gpipe(1, 1), 0, 1)


# --- Drawn ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_with_its_numbers(name, tmp_path):
    file = tmp_path / "x.svg"
    assert main(["draw", name, "-p", "4", "-m", "8", "-o", str(file)]) == 0
    text = file.read_text()
    assert {"gpipe": "33 units", "1f1b": "33 units", "interleaved": "57 units"}[name] in text
    assert f"a bubble of {'18.8' if name == 'interleaved' else '37.5'}%" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1f1b", "--collective", "barrier"], "1f1b is the schedule of a pipeline, and takes no --collective"),
        (["ring", "-m", "8"], "ring is an algorithm, and takes no -m"),
        (["gpipe", "-p", "8", "-m", "400"], "the picture: expected at most 400 units of time, got 1221"),
        (["interleaved", "-p", "4", "-m", "6"], "micro-batches of the interleaved schedule, which go by turns of 4"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(arguments, words, tmp_path, capsys):
    assert main(["draw", *arguments, "-o", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err.startswith(f"ringcomm draw: {words}")


@pytest.mark.slow
def test_schedules_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import ringcomm.cli, ringcomm.parallel.schedule"
    subprocess.run([sys.executable, "-c", code], check=True)
