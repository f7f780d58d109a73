"""Which ranks of the job have left traces, in groups that number them anew, and after they were restarted."""

import json
import os
import signal

import numpy as np
import pytest
from trace_files import call, run, write

import harness
from harness import failures
from harness.jobs import run_job
from ringcomm.commands.cli import main
from ringcomm.trace.entries import read
from ringcomm.trace.report import report


def test_ranks_without_a_trace_are_named(tmp_path, capsys, caplog):
    write(tmp_path, 0, call("barrier", 1, 10, epoch=1), size=4)
    write(tmp_path, 2, call("barrier", 1, 10, epoch=1), size=4)
    (tmp_path / "3.trace").touch()  # as where the disk was full
    assert "\n  no trace of ranks 1 and 3 (of 4)\n" in run(capsys, tmp_path)
    assert caplog.records[0].getMessage().endswith("/3.trace")
    write(tmp_path, 1, size=4)  # it has made no call
    text = run(capsys, tmp_path)
    assert "\n  no trace of rank 3 (of 4)\n" in text
    assert ["1", "0", "0", "0", "0"] in [line.split() for line in text.splitlines()]


def test_groups_come_in_the_order_of_their_calls_and_name_the_ranks_of_the_job(tmp_path, capsys):
    def group(name, members, begin):
        for rank, of_job in enumerate(members):
            if of_job is not None:
                facts = {"group": name, "size": len(members), "job_rank": of_job, "job_size": 8, "pid": 100 + of_job}
                write(tmp_path, rank, call("barrier", begin, begin + 1, epoch=1), **facts)

    group("ff", range(8), 1)
    group("aa", [0, 4, 5, 6, None, 7], 30)
    group("bb", [0, 2, 3], 20)
    groups = [line for line in run(capsys, tmp_path).splitlines() if line.startswith("group")]
    assert [line.partition(";")[0] for line in groups] == [
        "group ff, 8 ranks",
        "group bb, 3 ranks (0, 2 and 3 of the job)",
        "group aa, 6 ranks (0, 4 to 6, ? and 7 of the job)",
    ]


def test_a_rank_that_was_started_again_has_a_line_of_its_own(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for rank, pid in ((0, 100), (1, 101)):
        write(tmp_path, rank, call("barrier", 1, 2, epoch=1), pid=pid)
    for rank, pid in ((0, 100), (1, 99)):
        write(tmp_path, rank, call("barrier", 8, 9, epoch=1), group="grown", pid=pid)
    outputs = "-o", tmp_path / "trace.json", "--plot", tmp_path / "picture.svg"
    text = run(capsys, tmp_path, *outputs)
    assert text.startswith("2 ranks, 2 groups, 4 calls in 0.008 s\nrank 1 was restarted: process 101, then 99\n\n")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0, process 100", "rank 1, process 101", "rank 1, process 99"]
    picture = (tmp_path / "picture.svg").read_text()
    assert [label in picture for label in ("<!-- 0 -->", "<!-- rank 1, process 101 -->")] == [True, False]
    assert [label in picture for label in ("<!-- 1, process 101 -->", "<!-- 1, process 99 -->")] == [True, True]


def test_the_traces_of_two_jobs_are_refused(tmp_path, capsys):
    for rank in range(2):
        write(tmp_path, rank, call("barrier", 1, 2, epoch=1), group="77")
        write(tmp_path, rank, call("barrier", 3, 4, epoch=1), group="78")
        write(tmp_path, rank, call("barrier", 1, 2, epoch=1), group="99", job="other", size=3, pid=rank + 900)
    assert main(["trace", str(tmp_path)]) == 2
    words = f"expected the traces of one job, got those of 2 in {tmp_path}; move each to a folder of its own:"
    jobs = "  a job of size 2: 77-*.trace 78-*.trace\n  a job of size 3: 99-*.trace\n"
    assert capsys.readouterr().err == f"ringcomm trace: folder: {words}\n{jobs}"
    # A process that is in both makes them one.
    write(tmp_path, 2, call("barrier", 5, 6, epoch=1), group="99", job="other", size=3, pid=101)
    assert "group 99" in run(capsys, tmp_path)


def groups(comm, folder):
    part = comm.split(comm.rank // 2)
    with comm.trace(folder), part.trace(folder):
        comm.barrier()
        part.all_reduce(np.ones(3))
    part.close()


def test_each_group_has_recordings_of_its_own(tmp_path):
    harness.run(groups, 4, tmp_path)
    recordings = read(tmp_path)
    assert [(each.size, each.rank) for each in recordings] == [(4, 0), (4, 1), (4, 2), (4, 3), *[(2, 0), (2, 1)] * 2]
    assert [each.job_rank for each in recordings[4:]] in ([0, 1, 2, 3], [2, 3, 0, 1])
    assert {each.job_size for each in recordings} == {4}
    assert len({each.group for each in recordings}) == 3
    assert len({each.process for each in recordings}) == 4
    assert {call.name for each in recordings[:4] for call in each.calls} == {"barrier"}
    assert {call.name for each in recordings[4:] for call in each.calls} == {"all_reduce"}


def parts_alone(comm, folder):
    part = comm.split(comm.rank // 2, -comm.rank)
    with part.trace(folder):
        part.barrier()
    part.close()


def test_groups_of_a_job_without_a_common_rank_are_of_one_job(tmp_path, world):
    harness.run(parts_alone, 4, tmp_path, world=world)
    recordings = read(tmp_path)
    assert sorted((each.job_rank, each.rank) for each in recordings) == [(0, 1), (1, 0), (2, 1), (3, 0)]
    assert {each.job_size for each in recordings} == {4}
    text = report(recordings, lambda *_: 1.0)
    assert " ranks (1 and 0 of the job)" in text
    assert " ranks (3 and 2 of the job)" in text


def shrinking(comm, folder):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with comm.shrink() as shrunk, shrunk.trace(folder):
        shrunk.all_reduce(np.ones(1))


def test_after_a_shrink_the_report_has_the_ranks_of_the_job(tmp_path):
    with harness.world(4) as pool:
        for _ in failures.outcomes(pool, shrinking, tmp_path):
            pass
    recordings = read(tmp_path)
    assert [(each.rank, each.job_rank) for each in recordings] == [(0, 0), (1, 2), (2, 3)]
    assert ", 3 ranks (0, 2 and 3 of the job); memcpy" in report(recordings, lambda *_: 1.0)


# Rank 1 does not come back, and rank 2 as rank 1 of the two that go on.
RESPAWNED = """
import os, signal
import ringcomm

rank, restarts = (int(os.environ[f"RINGCOMM_{name}"]) for name in ("RANK", "RESTARTS"))
if rank == 1 and restarts:
    os.kill(os.getpid(), signal.SIGKILL)
comm = ringcomm.init()
comm.barrier()
if rank and not restarts:
    os.kill(os.getpid(), signal.SIGKILL)
if not rank:
    try:
        comm.barrier()
    except ringcomm.RingcommError:
        comm = comm.shrink(timeout=10).grow(timeout=10)
    comm.barrier()
assert comm.size == 2
"""


def test_a_rank_that_was_started_again_is_told_from_its_predecessor(tmp_path):
    run_job(tmp_path, 3, RESPAWNED, options=("--respawn=1",), RINGCOMM_TRACE=str(tmp_path / "trace"))
    recordings = read(tmp_path / "trace")
    first, second = dict.fromkeys(each.pid for each in recordings if each.job_rank == 2)
    text = report(recordings, lambda *_: 1.0)
    assert text.startswith("3 ranks, ")
    assert f"\nrank 2 was restarted: process {first}, then {second}\n" in text
    assert ", 2 ranks (0 and 2 of the job); memcpy" in text
