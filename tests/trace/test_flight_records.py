"""The record of a failure: what it leaves in which file, and how `ringcomm trace` prints it."""

import json
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
from ringcomm.trace import dump
from ringcomm.trace.flight_report import describe


def one_is_missing(comm):
    comm.barrier()
    if comm.rank == 0:
        comm.recv(np.ones(1), 2, timeout=1)
    comm.all_reduce(np.ones(5))


def differ(comm):
    comm.barrier()
    comm.all_reduce(np.ones(1 + comm.rank))


def dumped(folder, error, program, *args, ranks=3, launcher="fork", dead=None):
    """Let a program fail on all ranks, or let the `dead` one die, and return the files that it leaves."""
    with harness.world(ranks, launcher, [("RINGCOMM_DUMP", str(folder))]) as pool:
        for rank, outcome, _ in failures.outcomes(pool, program, *args):
            assert type(outcome) is (ConnectionError if rank == dead else error), outcome
    return sorted(folder.iterdir())


def sections_of(file):
    """Return the text of each rank of the first group in a file."""
    text = describe(file).split("\n\n")[1]
    ranks = re.split(r"\n  rank (\d)\n", text)
    assert ranks[1::2] == [str(rank) for rank in range(len(ranks) // 2)]
    return ranks[2::2]


def test_a_timeout_leaves_the_record_of_all_ranks(tmp_path, capsys):
    (file,) = dumped(tmp_path / "dump", ringcomm.CollectiveTimeout, one_is_missing)  # one of all ranks
    text = run(capsys, file)
    assert text == describe(file)
    assert text.startswith("CollectiveTimeout: timed out: rank 0 waited 1 s for recv")
    sections = sections_of(file)
    for calls in sections:
        assert "barrier() epoch 1, done" in calls
    # Whichever rank writes: the calls of some others may not have ended yet.
    assert re.search(r"recv\(float64 x 1, from 2\) with tag 0, (timed out|running)", sections[0])
    assert re.search(r"all_reduce\(float64 x 5, sum\) epoch 2, (timed out|running)", sections[1])
    assert "\n  ranks 0 and 2 wait for each other\n" in text


def test_a_program_reads_the_same_as_json_lines(tmp_path):
    (file,) = dumped(tmp_path, ringcomm.CollectiveTimeout, one_is_missing)
    head, *ranks = map(json.loads, file.read_text().splitlines())
    assert (head["version"], head["kind"]) == (3, "CollectiveTimeout")
    assert [(each["rank"], each["answered"], each["state"]) for each in ranks] == [(r, True, "") for r in range(3)]
    for each, waits_for in zip(ranks, (2, 0, 0), strict=True):
        first, *_, last = each["calls"]
        assert first["outcome"] in ("timed out", "aborted", "running")
        assert first["waits_for"] == waits_for
        assert (last["call"], last["outcome"], last["waits_for"]) == ("barrier() epoch 1", "done", None)
        assert last["seconds"] >= 0
        assert 0 < last["ago"] < harness.JOB


def test_a_mismatch_leaves_a_record(tmp_path):
    (file,) = dumped(tmp_path, ringcomm.MismatchError, differ, ranks=2)
    assert describe(file).startswith("MismatchError: the ranks called different things at epoch 2")
    assert "waits for" not in describe(file)


def differ_before_close(comm):
    comm.barrier()
    work = comm.all_reduce(np.ones(1 + comm.rank), async_op=True)
    failures.until(work.done, "the call")
    del work
    comm.close()


def test_a_mismatch_that_close_raises_leaves_a_record(tmp_path):
    (file,) = dumped(tmp_path, ringcomm.MismatchError, differ_before_close, ranks=2)
    assert describe(file).startswith("MismatchError: the ranks called different things at epoch 2")
    assert any("epoch 2, mismatch" in calls for calls in sections_of(file))


def die(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_a_lost_rank_leaves_a_record(tmp_path):
    (file,) = dumped(tmp_path, ringcomm.PeerLost, die, dead=1)
    assert re.match(r"PeerLost: rank 1 \(process \d+\) died", describe(file))
    assert "    dead" in describe(file)


def parts_fail(comm):
    part = comm.split(comm.rank % 2)
    if part.rank == 0:
        part.all_reduce(np.ones(3), timeout=0.5)
    part.recv(np.ones(1), 0, timeout=10)


def test_each_group_that_fails_leaves_a_record(tmp_path):
    files = dumped(tmp_path, ringcomm.CollectiveTimeout, parts_fail, ranks=4)
    assert len(files) == 2
    for file in files:
        assert len(re.findall("^group", describe(file), re.MULTILINE)) == 2  # the part, and the world


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
    for files in (1, 2):
        assert len(dumped(tmp_path, ringcomm.MismatchError, differ, ranks="01", launcher="nodes")) == files


def one_is_late(comm, over):
    comm.barrier()
    while comm.rank == comm.size - 1 and not Path(over).exists():
        time.sleep(0.01)
    try:
        comm.barrier(timeout=1)
    finally:
        Path(over).touch()


def test_a_late_rank_of_another_host_is_in_the_record(tmp_path):
    over = str(tmp_path / "over")
    (file,) = dumped(tmp_path / "dump", ringcomm.CollectiveTimeout, one_is_late, over, ranks="0011", launcher="nodes")
    sections = sections_of(file)
    for calls in sections:
        assert "barrier() epoch 1, done" in calls
    assert "barrier() epoch 2" not in sections[3]


def one_keeps_its_host_waiting(comm, over):
    """Rank 0 gives up first, as soon as rank 2 waits for rank 3, and writes what it sees."""
    if comm.rank:
        del os.environ["RINGCOMM_DUMP"]  # another rank that gets the error might be faster
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
    over = str(tmp_path / "over")
    (file,) = dumped(
        tmp_path / "dump",
        ringcomm.CollectiveTimeout,
        one_keeps_its_host_waiting,
        over,
        ranks="0011",
        launcher="nodes",
    )
    text = describe(file)
    assert "rank 0 waited 0.5 s" in text.partition("\n")[0]
    assert "\n  rank 2 waits for rank 3\n" in text, text


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
    late = sections_of(file)[1]
    assert late.startswith("    no answer at first\n")
    assert late.count("epoch 1, done") == 1  # it has added them once
    with file.open("a") as half:
        half.write('\n{"group": "')  # as far as a full disk had room
    assert len(sections_of(file)) == 2


def test_of_two_first_writers_the_second_adds_its_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as both have found it
    error, done = ringcomm.PeerLost("rank 2 died"), {"outcome": "done", "seconds": 1.0, "ago": 2.0, "waits_for": None}

    def report(rank, *calls):
        calls = [{"call": call, **done} for call in calls]
        return {"rank": rank, "answered": bool(calls), "state": "no answer" * (not calls), "calls": calls}

    with ringcomm.init() as comm:
        facts = {"size": 2, "handle": comm._transport.handle}
        for rank, reports in ((0, [report(0, "a"), report(1)]), (1, [report(0), report(1, "b")]), (1, [])):
            group = SimpleNamespace(rank=rank, rank_reports=lambda _, reports=reports: reports, **facts)
            dump._dump(tmp_path, [group], error)
    (file,) = tmp_path.iterdir()
    took = "done after 1.00 s, 2.000 s ago"
    assert describe(file).splitlines()[-5:] == [
        *("  rank 0", f"    a, {took}", "  rank 1", "    no answer at first", f"    b, {took}")
    ]


CALL = {"call": "barrier()", "outcome": "done", "seconds": 1.0, "ago": 2.0, "waits_for": None}


def head_of(error):
    return json.dumps({"version": 3, "kind": "PeerLost", "error": error})


def record_of(**fields):
    """Return a line of a flight record."""
    whole = {"group": "g", "seen_by": 0, "rank": 0, "answered": True, "state": "", "calls": [CALL]}
    return json.dumps(whole | fields)


DAMAGED = [
    *("{}", "[]", "7", '{"group": "', "[" * 100_000),
    *(record_of(calls=calls) for calls in (None, [7], [CALL | {"seconds": "x"}], [CALL | {"waits_for": [1]}])),
    record_of(calls=[{name: value for name, value in CALL.items() if name != "ago"}]),
]


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, capsys, caplog):
    file = tmp_path / "x.flight"
    file.write_text("\n".join([head_of("the error"), *DAMAGED, record_of(rank=1)]))
    took = "done after 1.00 s, 2.000 s ago"
    assert run(capsys, file) == f"PeerLost: the error\n\ngroup g, seen by rank 0\n  rank 1\n    barrier(), {took}\n"
    assert f"left out {len(DAMAGED)} lines, which are damaged" in caplog.text


def test_escape_sequences_are_printed_as_text(tmp_path):
    file = tmp_path / "x.flight"
    file.write_text(head_of("an\x1b[2J error\nin two lines") + "\n" + record_of(state="\x9b2J", calls=[]))
    assert describe(file).splitlines()[:2] == [r"PeerLost: an\x1b[2J error", "in two lines"]
    assert r"    \x9b2J" in describe(file)


@pytest.mark.parametrize("text", ["", "{}", '{"version": 3, "kind": "PeerLost", "error": 5}', "[" * 100_000])
def test_another_file_is_refused(tmp_path, capsys, text):
    (tmp_path / "file").write_text(text)
    assert main(["trace", str(tmp_path / "file")]) != 0
    assert "expected a flight record, as RINGCOMM_DUMP makes" in capsys.readouterr().err


def test_a_folder_of_flight_records_is_refused_with_the_command_that_prints_one(tmp_path, capsys):
    (tmp_path / "x.flight").touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert f"got 1 flight record in {tmp_path}: print one by `ringcomm trace {tmp_path}/x.flight`" in (
        capsys.readouterr().err
    )


def test_a_flight_record_takes_no_options(tmp_path, capsys):
    (tmp_path / "x.flight").write_text("{}")
    outputs = "-o", str(tmp_path / "x"), "--plot", str(tmp_path / "y.png")
    assert main(["trace", str(tmp_path / "x.flight"), *outputs, "--from", "0", "--until", "1"]) == 2
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
