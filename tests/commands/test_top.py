"""`ringcomm top` on jobs whose ranks are stopped, killed, busy, closed or wait for each other."""

import contextlib
import json
import os
import re
import signal
import time

import numpy as np
import pytest

import failures
import harness
from ringcomm.commands import top
from ringcomm.commands.cli import main
from ringcomm.trace import live
from ringcomm.trace.waiting import explain

SIZE = 3


def look(capsys, *options):
    assert main(["top", "--once", "--interval", "0.05", *options]) == 0
    return capsys.readouterr().out


def looks(capsys, pids, wanted):
    """Return the ranks of the job of these processes as soon as they are as wanted, from --json."""

    def found():
        jobs = json.loads(look(capsys, "--json"))
        ours = [job for job in jobs if {rank["pid"] for rank in job["ranks"]} == set(pids)]
        return ours and wanted(ours[0]["ranks"]) and ours[0]

    return failures.until(found, "top to see it")


def pid(comm):  # noqa: ARG001
    return os.getpid()


@contextlib.contextmanager
def busy(pool, fn, *args):
    """Let the ranks call `fn`; yield their processes."""
    pids = pool.run(pid, ())
    for connection in pool.connections:
        connection.send((fn, args))
    yield pids


def in_a_barrier(comm, stopped):
    if comm.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier()


def finish(pool, pids):
    for each in pids:
        os.kill(each, signal.SIGCONT)
    return [harness.receive(connection, rank) for rank, connection in enumerate(pool.connections)]


def test_a_stopped_rank_is_named_with_those_that_wait_for_it(capsys):
    with failures.mortals(SIZE) as pool, busy(pool, in_a_barrier, 1) as pids:
        job = looks(
            capsys,
            pids,
            lambda ranks: [rank["waits_for"] for rank in ranks] == [1, None, 1] and ranks[1]["state"] == "stopped",
        )
        assert [rank["pid"] for rank in job["ranks"]] == pids
        assert [rank["state"] for rank in job["ranks"]] == ["runs", "stopped", "runs"]
        assert [rank["call"] for rank in job["ranks"]] == ["barrier() epoch 1", None, "barrier() epoch 1"]
        assert job["ranks"][0]["seconds"] > 0
        text = look(capsys)
        assert "ranks 0 and 2 wait for rank 1: stopped, in no call" in text
        assert re.search(rf"  0 +{pids[0]} .* barrier\(\) epoch 1 for \d+\.\d s, waits for rank 1$", text, re.MULTILINE)
        assert finish(pool, pids) == [(None, None)] * SIZE


def calls_twice(comm, count):
    for _ in range(2):
        comm.all_reduce(np.ones(count))


def test_a_rank_in_no_call_and_counts(capsys):
    with failures.mortals(SIZE) as pool:
        pids = pool.run(pid, ())
        pool.run(calls_twice, (1000,))
        ranks = looks(capsys, pids, lambda ranks: True)["ranks"]
        assert [(rank["state"], rank["call"], rank["waits_for"]) for rank in ranks] == [("runs", None, None)] * SIZE
        assert [rank["calls"] for rank in ranks] == [2] * SIZE
        assert [rank["bytes"] for rank in ranks] == [16_000] * SIZE
        assert f"{SIZE} ranks: " in look(capsys)


def wait_in_a_part(comm):
    part = comm.split(0 if comm.rank else None)
    if comm.rank == 2:
        time.sleep(1.0)
    if part:
        part.sendrecv(np.ones(1), 1 - part.rank, np.ones(1), 1 - part.rank)


def test_a_wait_in_a_group_names_the_rank_of_the_job(capsys):
    with failures.mortals(SIZE) as pool, busy(pool, wait_in_a_part) as pids:
        job = looks(capsys, pids, lambda ranks: ranks[1]["waits_for"] == 2)
        assert job["ranks"][1]["call"] == "recv(float64 x 1, from 1) in a group of 2"
        finish(pool, pids)


def one_closes(comm):
    if comm.rank == 1:
        comm.close()


def test_a_rank_that_has_closed(capsys):
    with failures.mortals(SIZE) as pool:
        pids = pool.run(pid, ())
        pool.run(one_closes, ())
        ranks = looks(capsys, pids, lambda ranks: True)["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "closed", "runs"]


def test_a_killed_rank_is_gone(capsys):
    with failures.mortals(SIZE) as pool:
        pids = pool.run(pid, ())
        pool.workers[1].kill()
        pool.workers[1].join()
        ranks = looks(capsys, pids, lambda ranks: ranks[1]["state"] == "gone")["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "gone", "runs"]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2]


def test_those_that_are_left_after_a_shrink_run(capsys):
    with failures.mortals(SIZE) as pool:
        pids = pool.run(pid, ())
        outcomes = {rank: outcome for rank, outcome, _ in failures.outcomes(pool, shrinks)}
        assert outcomes[0] == outcomes[2] == 2
        ranks = looks(capsys, pids, lambda ranks: ranks[1]["state"] == "gone")["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "gone", "runs"]


kept = []


def shrinks(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kept.append(comm.shrink())
    return kept[0].size


def test_no_job(capsys, monkeypatch):
    monkeypatch.setattr(live, "_mappings", lambda: iter(()))
    assert look(capsys) == "no jobs of this user\n"
    assert json.loads(look(capsys, "--json")) == []


def test_processes_of_other_users_do_not_matter(capsys, monkeypatch):
    with failures.mortals(2) as pool:
        pids = pool.run(pid, ())
        looks(capsys, pids, lambda ranks: True)
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert json.loads(look(capsys, "--json")) == []


@pytest.mark.parametrize(
    ("waits", "lines"),
    [
        ({}, []),
        ({0: 1}, ["rank 0 waits for rank 1: sleeps"]),
        ({0: 1, 2: 1, 3: 1}, ["ranks 0, 2 and 3 wait for rank 1: sleeps"]),
        ({0: 2, 2: 3}, ["rank 2 waits for rank 3"]),
        ({0: 2, 2: 0}, ["ranks 0 and 2 wait for each other"]),
        ({0: 2, 2: 3, 3: 2, 4: 1}, ["rank 4 waits for rank 1: sleeps", "ranks 2 and 3 wait for each other"]),
    ],
)
def test_who_holds_whom_up(waits, lines):
    assert list(explain(waits, {1: "sleeps"})) == lines


def test_it_looks_again_until_it_is_interrupted(capsys, monkeypatch):
    seen = []

    def find_jobs():
        seen.append(len(seen))
        if len(seen) == 4:
            raise KeyboardInterrupt
        rank = live.Rank(0, 1, "runs", calls=len(seen) * 10, bytes=len(seen) * 10**8)
        return [live.RunningJob(1, "a job", [rank])]

    monkeypatch.setattr(top, "find_jobs", find_jobs)
    with contextlib.suppress(KeyboardInterrupt):
        main(["top", "--interval", "0.01"])
    assert capsys.readouterr().out.count("     0        1      1,000   10.00  in no call") == 2
