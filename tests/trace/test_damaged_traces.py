"""Entries that are damaged are left out with a warning, whatever the damage: nothing absurd is reported as a fact."""

import json
import logging
import random

import pytest

import ringcomm
from ringcomm.trace.chrome import events
from ringcomm.trace.entries import read
from ringcomm.trace.files import CLOCK, ENTRY
from ringcomm.trace.recorder import HEADER_BYTES
from ringcomm.trace.report import report
from ringcomm.types import COLLECTIVES
from trace_files import TICKS, call, entry, mark, wait, write

SAMPLES = 0, 5, 1000  # of the clock, in ms: a trace that has ended


@pytest.mark.parametrize(
    "facts",
    [
        {"queued": 200},
        {"queued": 2, "path": 1},
        {"waited": 11 * TICKS},
        {"waited_256": 11 * TICKS // 256},
        {"start": -1 * TICKS % 2**64},
        {"end": 1002 * TICKS},
        {"end": 2**63},
        {"end": 2**64 - 1},
        {"late": 2},
        {"late": -2},
        {"count": 2**60},
    ],
)
def test_a_damaged_entry_is_left_out(tmp_path, facts, caplog):
    around = call("barrier", 10, 20), call("barrier", 50, 60)
    damaged = entry(COLLECTIVES["barrier"].code, 30, 40, **facts)
    write(tmp_path, 0, around[0], damaged, around[1], clocks=SAMPLES)
    write(tmp_path, 1, around[0], call("barrier", 30, 40), around[1], clocks=SAMPLES)
    first, second = read(tmp_path)
    assert [(round(each.start * 1e3), round(each.end * 1e3)) for each in first.calls] == [(0, 10), (40, 50)]
    assert len(second.calls) == 3
    (warning,) = caplog.records
    assert warning.getMessage() == f"{tmp_path / '0.trace'}: left out 1 of 6 entries, which are damaged"


def test_a_damaged_time_in_the_file_of_a_killed_rank_is_left_out(tmp_path, caplog):
    calls = [call("barrier", 10 * at, 10 * at + 5) for at in range(1, 9)]
    calls[3] = call("barrier", 40, 40_000)
    write(tmp_path, 0, *calls, clocks=(0, 5))
    (recording,) = read(tmp_path)
    assert len(recording.calls) == 7
    assert "left out 1 of 10 entries" in caplog.text


@pytest.mark.parametrize("ends", [[20, 10_050], [2000, 4000, 6000, 8000], [5000, 5050]])
def test_the_calls_of_a_killed_rank_may_be_far_apart(tmp_path, ends, caplog):
    write(tmp_path, 0, *[call("barrier", 10, end) for end in ends], clocks=(0, 5))
    (recording,) = read(tmp_path)
    assert len(recording.calls) == len(ends)
    assert not caplog.records


def test_early_clock_samples_hold_beside_many_late_ones(tmp_path, caplog):
    for rank in range(8):
        write(tmp_path, rank, call("barrier", 10, 20), clocks=(0, 5), size=28)
    hours = 36_000_000  # ms, in which the clock gained 360 on the ticks
    for rank in range(8, 28):
        later = call("barrier", hours + 10, hours + 20)
        write(tmp_path, rank, later, clocks=(hours, hours + 5, hours + 100), size=28, behind=-360)
    assert [len(each.calls) for each in read(tmp_path)] == [1] * 28
    assert not caplog.records


def test_a_damaged_clock_sample_is_left_out(tmp_path, caplog):
    write(tmp_path, 0, call("barrier", 10, 20), clocks=SAMPLES)
    write(tmp_path, 1, call("barrier", 10, 20), entry(CLOCK, 30, 31, count=5_000_000), clocks=SAMPLES)
    for each in read(tmp_path):
        assert [(round(call.start * 1e3), round(call.end * 1e3)) for call in each.calls] == [(0, 10)]
    assert "1.trace: left out 1 of 5 entries" in caplog.text


def test_no_damage_is_reported_as_a_fact(tmp_path):
    log = logging.getLogger("ringcomm")
    log.disabled = True  # a warning for each
    damage = random.Random(5)
    for rank in range(2):
        calls = [call("all_reduce", at, at + 9, count=1000, epoch=at, waited=5, late=1 - rank) for at in (10, 20, 30)]
        write(tmp_path, rank, *calls, wait(40, 45), mark("step", 50), mark("step", 60), clocks=SAMPLES)
    try:
        for _ in range(300):
            file = tmp_path / f"{damage.randrange(2)}.trace"
            whole = file.read_bytes()
            data = bytearray(whole)
            for _ in range(damage.choice((1, 1, 8))):
                at = damage.choice((damage.randrange(300), HEADER_BYTES + damage.randrange(9 * ENTRY.itemsize)))
                data[at] = damage.choice((damage.randrange(256), data[at] ^ 1 << damage.randrange(8)))
            file.write_bytes(data)
            _check(tmp_path)
            file.write_bytes(whole)
    finally:
        log.disabled = False


def _check(folder):
    try:
        recordings = read(folder)
    except ringcomm.ArgumentError:  # two jobs, for example
        return
    report(recordings, lambda *_: 1.0)
    json.dumps(events(recordings), allow_nan=False)
    for each in recordings:
        for found in each.calls:
            assert -2 < found.start <= found.end < 2
            assert 0 <= found.waited <= found.end - found.start + 1e-9
            assert found.waited_for <= found.waited + 1e-9
