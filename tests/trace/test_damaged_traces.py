"""Entries that are damaged are left out with a warning, whatever the damage: nothing absurd is reported as a fact."""

import json
import logging
import random

import numpy as np
import pytest
from trace_files import call, clock, mark, wait, write

import ringcomm
from ringcomm.trace.chrome import events
from ringcomm.trace.entries import read
from ringcomm.trace.files import ENTRY, checksums
from ringcomm.trace.recorder import HEADER_BYTES
from ringcomm.trace.report import report

SAMPLES = 0, 5, 1000  # of the clock, in ms: a trace that has ended


def damaged(entry, at):
    """Return an entry with one bit changed."""
    data = bytearray(entry)
    data[at // 8] ^= 1 << at % 8
    return bytes(data)


@pytest.mark.parametrize("whole", [call("barrier", 30, 40, epoch=7), wait(30, 40), mark("step", 30), clock(30, 5000)])
def test_the_checksum_tells_every_changed_bit(whole):
    entries = np.frombuffer(b"".join([whole, *(damaged(whole, at) for at in range(8 * len(whole)))]), ENTRY)
    assert (checksums(entries) == entries["checksum"]).tolist() == [True] + [False] * 8 * len(whole)


@pytest.mark.parametrize("at", [0, 8 * 8, 24 * 8, 52 * 8], ids=["signature", "start", "count", "late"])
def test_a_damaged_entry_is_left_out(tmp_path, at, caplog):
    calls = call("barrier", 10, 20), call("barrier", 30, 40), call("barrier", 50, 60)
    write(tmp_path, 0, calls[0], damaged(calls[1], at), calls[2], clocks=SAMPLES)
    write(tmp_path, 1, *calls, clocks=SAMPLES)
    first, second = read(tmp_path)
    assert [(round(each.start * 1e3), round(each.end * 1e3)) for each in first.calls] == [(0, 10), (40, 50)]
    assert len(second.calls) == 3
    (warning,) = caplog.records
    assert warning.getMessage() == f"{tmp_path / '0.trace'}: left out 1 of 6 entries, which are damaged"


def test_a_damaged_clock_sample_is_left_out(tmp_path, caplog):
    write(tmp_path, 0, call("barrier", 10, 20), clocks=SAMPLES)
    write(tmp_path, 1, call("barrier", 10, 20), damaged(clock(30, 5_000_000), 30 * 8), clocks=SAMPLES)
    for each in read(tmp_path):
        assert [(round(call.start * 1e3), round(call.end * 1e3)) for call in each.calls] == [(0, 10)]
    assert "1.trace: left out 1 of 5 entries" in caplog.text


def test_a_damaged_header_is_refused(tmp_path):
    write(tmp_path, 0, call("barrier", 10, 20))
    file = tmp_path / "0.trace"
    file.write_bytes(file.read_bytes().replace(b'"rank": 0', b'"rank": 1', 1))
    with pytest.raises(ringcomm.ArgumentError, match="file: expected a trace"):
        read(tmp_path)


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
