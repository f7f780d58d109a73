"""The record of a failure: what it leaves in which file, and how `ringcomm trace` prints it."""

import logging
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from trace_files import run

import harness
import ringcomm
from harness import failures
from ringcomm.commands.cli import main
from ringcomm.trace.dump import _dump, describe


def one_is_missing(comm):
    comm.barrier()
    if comm.rank == 0:
        comm.recv(np.ones(1), 2, timeout=1)
    comm.all_reduce(np.ones(5))


def differ(comm):
    comm.barrier()
    comm.all_reduce(np.ones(1 + comm.rank))


def test_a_timeout_leaves_the_record_of_all_ranks(tmp_path, capsys):
    with harness.world(3, settings=[("RINGCOMM_DUMP", str(tmp_path / "dump"))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, one_is_missing):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    (file,) = (tmp_path / "dump").iterdir()  # one of all ranks
    text = run(capsys, file)
    assert text == describe(file)
    assert text.startswith("CollectiveTimeout: timed out: rank 0 waited 1 s for recv")
    sections = re.split(r"\n  rank (\d)\n", text)
    assert sections[1::2] == ["0", "1", "2"]
    for calls in sections[2::2]:
        assert "barrier() epoch 1, done" in calls
    # Whichever rank writes: the calls of some others may not have ended yet.
    assert re.search(r"recv\(float64 x 1, from 2\), (timed out|running)", sections[2])
    assert re.search(r"all_reduce\(float64 x 5, sum\) epoch 2, (timed out|running)", sections[4])
    assert "\n  ranks 0 and 2 wait for each other\n" in text


def test_a_mismatch_leaves_a_record(tmp_path):
    with harness.world(2, settings=[("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, differ):
            assert isinstance(outcome, ringcomm.MismatchError)
    (file,) = tmp_path.iterdir()
    assert describe(file).startswith("MismatchError: the ranks called different things at epoch 2")


def die(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_a_lost_rank_leaves_a_record(tmp_path):
    with harness.world(3, settings=[("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        outcomes = {rank: outcome for rank, outcome, _ in failures.outcomes(pool, die)}
    assert {type(outcomes[rank]) for rank in (0, 2)} == {ringcomm.PeerLost}
    (file,) = tmp_path.iterdir()
    assert re.match(r"PeerLost: rank 1 \(process \d+\) died", describe(file))
    assert "    dead" in describe(file)


def parts_fail(comm):
    part = comm.split(comm.rank % 2)
    if part.rank == 0:
        part.all_reduce(np.ones(3), timeout=0.5)
    part.recv(np.ones(1), 0, timeout=10)


def test_each_group_that_fails_leaves_a_record(tmp_path):
    with harness.world(4, settings=[("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, parts_fail):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    texts = [describe(file) for file in tmp_path.iterdir()]
    assert len(texts) == 2
    assert all(len(re.findall("^group", text, re.MULTILINE)) == 2 for text in texts)  # the part, and the world


def differ_twice(comm):
    """Return the warnings."""
    log, warnings = logging.getLogger("ringcomm"), []
    log.addFilter(lambda record: warnings.append(record.getMessage()))
    for _ in range(2):
        failures.raised(ringcomm.MismatchError, lambda: comm.all_reduce(np.ones(1 + comm.rank)))
    return warnings


def test_a_failure_whose_record_cannot_be_written_is_raised_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    with harness.world(2, settings=[("RINGCOMM_DUMP", str(tmp_path / "file"))]) as pool:
        for _, warnings, _ in failures.outcomes(pool, differ_twice):
            (warning,) = warnings
            assert re.match(r"cannot write a flight record to .*/file, .*: File exists", warning)


def test_jobs_between_hosts_leave_a_record_each(tmp_path):
    for _ in range(2):
        with harness.world("01", "nodes", [("RINGCOMM_DUMP", str(tmp_path))]) as pool:
            answers = [*failures.outcomes(pool, differ)]
        for _, outcome, _ in answers:
            assert isinstance(outcome, ringcomm.MismatchError)
    assert len([*tmp_path.iterdir()]) == 2


def one_is_late(comm, over):
    comm.barrier()
    while comm.rank == comm.size - 1 and not Path(over).exists():
        time.sleep(0.01)
    try:
        comm.barrier(timeout=1)
    finally:
        Path(over).touch()


def test_a_late_rank_of_another_host_is_in_the_record(tmp_path):
    dump = tmp_path / "dump"
    with harness.world("0011", "nodes", [("RINGCOMM_DUMP", str(dump))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, one_is_late, str(tmp_path / "over")):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    (file,) = dump.iterdir()
    sections = re.split(r"\n  rank (\d)\n", describe(file))
    assert sections[1::2] == ["0", "1", "2", "3"]
    for calls in sections[2::2]:
        assert "barrier() epoch 1, done" in calls
    assert "barrier() epoch 2" not in sections[8]


def one_keeps_its_host_waiting(comm, over):
    """Rank 0 gives up first, as soon as rank 2 waits for rank 3."""
    comm.barrier()
    try:
        if comm.rank == 0:
            waits = "waits for rank 3"
            failures.until(lambda: waits in failures.lines_of(comm._transport.report(1))[2], f"rank 2 {waits}")
            comm.barrier(timeout=0.5)
        elif comm.rank == 3:
            failures.until(Path(over).exists, over)
        comm.barrier()
    finally:
        if comm.rank == 0:
            Path(over).touch()


def test_who_waits_for_another_host_waits_for_the_rank_that_is_late_there(tmp_path):
    dump = tmp_path / "dump"
    with harness.world("0011", "nodes", [("RINGCOMM_DUMP", str(dump))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, one_keeps_its_host_waiting, str(tmp_path / "over")):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    (file,) = dump.iterdir()
    error, *told = describe(file).split("\n\n")[0].splitlines()
    assert "rank 0 waited 0.5 s" in error
    assert told[-1] == "  rank 2 waits for rank 3"


def one_is_late_and_asks_again(comm, over):
    with suppress(ringcomm.CollectiveTimeout):
        one_is_late(comm, over)
    failures.raised(ringcomm.CollectiveTimeout, comm.barrier)


def test_a_late_rank_that_is_alone_on_its_host_adds_its_calls(tmp_path):
    dump = tmp_path / "dump"
    with harness.world("01", "nodes", [("RINGCOMM_DUMP", str(dump))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, one_is_late_and_asks_again, str(tmp_path / "over")):
            assert outcome is None
    (file,) = dump.iterdir()
    sections = re.split(r"\n  rank (\d)\n", describe(file))
    assert sections[1::2] == ["0", "1"]
    late = sections[4].splitlines()
    assert late[0] == "    no answer at first"
    assert late[-1].startswith("    barrier() epoch 1, done")
    assert sections[4].count("epoch 1, done") == 1  # it has added them once
    with file.open("a") as half:
        half.write('\n{"group": "')  # as far as a full disk had room
    assert re.split(r"\n  rank (\d)\n", describe(file))[3::2] == ["1"]


def test_of_two_first_writers_the_second_adds_its_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as both have found it
    error = ringcomm.PeerLost("rank 2 died")
    with ringcomm.init() as comm:
        facts = {"size": 2, "handle": comm._transport.handle}
        for rank, report in ((0, "rank 0: a\nrank 1: no answer\n"), (1, "rank 0: no answer\nrank 1: b\n"), (1, "")):
            _dump(tmp_path, [SimpleNamespace(rank=rank, report=lambda _, text=report: text, **facts)], error)
    (file,) = tmp_path.iterdir()
    assert describe(file).splitlines()[-5:] == ["  rank 0", "    a", "  rank 1", "    no answer at first", "    b"]


def test_another_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("{}")
    assert main(["trace", str(tmp_path / "file")]) != 0
    assert "expected a flight record, as RINGCOMM_DUMP makes" in capsys.readouterr().err


def test_a_flight_record_takes_no_options(tmp_path, capsys):
    (tmp_path / "x.flight").write_text("{}")
    assert main(["trace", str(tmp_path / "x.flight"), "-o", "x", "--plot", "y", "--from", "0", "--until", "1"]) == 2
    assert "expected a folder of traces, for -o and --plot and --from and --until, got" in capsys.readouterr().err


def test_a_grow_that_finds_nobody_took_little_time():
    with ringcomm.init() as comm:
        for _ in range(20):
            with comm._transport.recorded("grow"):
                pass
        text = comm.report(20)
    times = re.findall(r"grow\(\), done after ([\d.]+) s", text)
    assert len(times) == 20
    assert all(float(each) < 60 for each in times)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ringcomm.PeerLost("x"), "peer lost"),
        (KeyboardInterrupt(), "interrupted"),
        (OSError("no route to host"), "failed"),
        (SystemExit(), "failed"),
    ],
)
def test_how_a_grow_has_failed(error, outcome):
    with ringcomm.init() as comm:
        with pytest.raises(type(error)), comm._transport.recorded("grow"):
            raise error
        assert f"grow(), {outcome} after" in comm.report(1)


def test_a_grow_has_ended_before_the_old_communicator_is_closed(monkeypatch):
    comm, grown, texts = ringcomm.init(), ringcomm.init(), []
    monkeypatch.setattr(comm, "_job", Mock(grow=lambda *_: grown))
    close = comm.close
    monkeypatch.setattr(comm, "close", lambda: (texts.append(comm.report(1)), close()))
    with comm.grow() as same:
        assert same is grown
    (text,) = texts
    assert "grow(), done after" in text
