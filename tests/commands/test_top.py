"""`ringcomm top` on jobs whose ranks are stopped, killed, busy, closed or wait for each other."""

import contextlib
import json
import os
import re
import signal
import sys

import numpy as np
import pytest

import harness
from harness import failures
from harness.nodes import Job
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
    pool.start(fn, args)
    yield pids


def in_a_barrier(comm, stopped):
    if comm.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier()


def finish(pool, pids):
    for each in pids:
        os.kill(each, signal.SIGCONT)
    return [pool.receive(rank).error for rank in range(len(pids))]


def test_a_stopped_rank_is_named_with_those_that_wait_for_it(capsys):
    with harness.world(SIZE) as pool, busy(pool, in_a_barrier, 1) as pids:
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
        assert finish(pool, pids) == [None] * SIZE


def calls_twice(comm, count):
    for _ in range(2):
        comm.all_reduce(np.ones(count))


def test_a_rank_in_no_call_and_counts(capsys):
    with harness.world(SIZE) as pool:
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
        os.kill(os.getpid(), signal.SIGSTOP)
    if part:
        part.sendrecv(np.ones(1), 1 - part.rank, np.ones(1), 1 - part.rank)


def test_a_wait_in_a_group_names_the_rank_of_the_job(capsys):
    with harness.world(SIZE) as pool, busy(pool, wait_in_a_part) as pids:
        job = looks(capsys, pids, lambda ranks: ranks[1]["waits_for"] == 2)
        assert job["ranks"][1]["call"] == "recv(float64 x 1, from 1) with tag 0 in a group of 2"
        finish(pool, pids)


def test_a_command_stays_in_its_line(capsys, monkeypatch):
    job = live.RunningJob(1, "python -c a\nb\x1b[2J", 1, [live.Rank(0, 1, "runs")])
    monkeypatch.setattr(top, "find_jobs", lambda: [job])
    assert look(capsys).splitlines()[0] == r"1 rank: python -c a\nb\x1b[2J"


def one_closes(comm):
    if comm.rank == 1:
        comm.close()


def test_a_rank_that_has_closed(capsys):
    with harness.world(SIZE) as pool:
        pids = pool.run(pid, ())
        pool.run(one_closes, ())
        ranks = looks(capsys, pids, lambda ranks: True)["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "closed", "runs"]


def test_a_killed_rank_is_gone(capsys):
    with harness.world(SIZE) as pool:
        pids = pool.run(pid, ())
        pool.processes[1].kill()
        pool.processes[1].join()
        ranks = looks(capsys, pids, lambda ranks: ranks[1]["state"] == "lost")["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "lost", "runs"]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2]


def test_those_that_are_left_after_a_shrink_run(capsys):
    with harness.world(SIZE) as pool:
        pids = pool.run(pid, ())
        outcomes = {rank: outcome for rank, outcome, _ in failures.outcomes(pool, shrinks)}
        assert outcomes[0] == outcomes[2] == 2
        ranks = looks(capsys, pids, lambda ranks: ranks[1]["state"] == "lost")["ranks"]
        assert [rank["state"] for rank in ranks] == ["runs", "lost", "runs"]


BETWEEN_HOSTS = """
import os, signal
import ringcomm

with ringcomm.init() as comm:
    host = comm.split(comm.rank // 2)
    print(os.getpid(), flush=True)
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    host.barrier()
"""


def test_the_ranks_of_a_host_have_their_numbers_in_the_job(tmp_path, capsys):
    (tmp_path / "program.py").write_text(BETWEEN_HOSTS)
    with contextlib.closing(Job(tmp_path, 2)) as job:
        launchers = [job.start(node, 2, str(tmp_path / "program.py"), host_id=str(node)) for node in range(2)]
        pids = {int(launchers[1].stdout.readline().split()[-1]) for _ in range(2)}
        found = looks(capsys, pids, lambda ranks: ranks[0]["waits_for"] == 3 and ranks[1]["state"] == "stopped")
        assert (found["size"], [rank["rank"] for rank in found["ranks"]]) == (4, [2, 3])
        text = look(capsys)
        assert "2 ranks of 4, on this host: " in text
        assert "rank 2 waits for rank 3: stopped, in no call" in text
        (stopped,) = (rank["pid"] for rank in found["ranks"] if rank["rank"] == 3)
        os.kill(stopped, signal.SIGKILL)


ALL_IN_A_BARRIER = """
import os, signal
import ringcomm

with ringcomm.init() as comm:
    print(os.getpid(), flush=True)
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier()
"""


@pytest.mark.parametrize("here", [1, 2])
def test_ranks_that_wait_for_another_host_say_so(here, tmp_path, capsys):
    (tmp_path / "program.py").write_text(ALL_IN_A_BARRIER)
    with contextlib.closing(Job(tmp_path, 2)) as job:
        launchers = [job.start(node, here, str(tmp_path / "program.py"), host_id=str(node)) for node in range(2)]
        hosts = [[int(each.stdout.readline().split()[-1]) for _ in range(here)] for each in launchers]
        waits = [{0: 1}, {1: None}] if here == 1 else [{0: 2, 1: 0}, {2: 3, 3: None}]
        for pids, wanted in zip(hosts, waits, strict=True):
            found = looks(
                capsys, pids, lambda ranks, wanted=wanted: {r["rank"]: r["waits_for"] for r in ranks} == wanted
            )
            assert found["size"] == 2 * here
            for rank in found["ranks"]:
                if wanted[rank["rank"]] is not None:
                    assert rank["call"].startswith("barrier() epoch")
                    assert rank["seconds"] > 0
            (stopped,) = [rank for rank in found["ranks"] if wanted[rank["rank"]] is None] or [None]
            assert stopped is None or (stopped["state"], stopped["call"]) == ("stopped", None)
        os.kill(stopped["pid"], signal.SIGKILL)


def test_numbers_in_the_job_are_kept_only_if_they_are_known(monkeypatch):
    def numbers(places, states=("runs",) * 3):
        monkeypatch.setattr(live, "_place", places.get)
        ranks = [live.Rank(own, 100 + own, state, waits_for=1) for own, state in enumerate(states)]
        size = live._number_in_job(ranks)
        return size, [each.rank for each in ranks], ranks[0].waits_for

    assert numbers({100: (4, 8), 101: (5, 8), 102: (6, 8)}) == (8, [4, 5, 6], 5)
    assert numbers({100: (1, 8), 101: (3, 8), 102: (5, 8)}) == (8, [1, 3, 5], 3)
    assert numbers({}) == (3, [0, 1, 2], 1)
    assert numbers({100: (0, 1), 101: (0, 1), 102: (0, 1)}) == (3, [0, 1, 2], 1)  # what they have inherited
    lost = ("runs", "lost", "runs")
    assert numbers({100: (4, 8), 101: (0, 1), 102: (6, 8)}, lost) == (8, [4, 5, 6], 5)
    assert numbers({100: (1, 8), 102: (5, 8)}, lost) == (3, [0, 1, 2], 1)


kept = []


def shrinks(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kept.append(comm.shrink())
    return kept[0].size


def shrinks_late(comm, late):
    if comm.rank == late:
        os.kill(os.getpid(), signal.SIGSTOP)
    kept.append(comm.shrink())


def test_a_rank_in_shrink_says_for_whom_it_waits(capsys):
    with harness.world(SIZE) as pool, busy(pool, shrinks_late, 1) as pids:
        ranks = looks(capsys, pids, lambda ranks: [rank["waits_for"] for rank in ranks] == [1, None, 1])["ranks"]
        assert [rank["call"] for rank in ranks] == ["shrink()", None, "shrink()"]
        assert finish(pool, pids) == [None] * SIZE


def test_no_job(capsys, monkeypatch):
    monkeypatch.setattr(live, "_mappings", lambda: iter(()))
    assert look(capsys) == "no jobs of this user\n"
    assert json.loads(look(capsys, "--json")) == []


def test_processes_of_other_users_do_not_matter(capsys, monkeypatch):
    with harness.world(2) as pool:
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
        ({0: 3, 1: 3, 2: 3}, ["ranks 0-2 wait for rank 3"]),
        ({0: 2, 2: 3}, ["rank 2 waits for rank 3"]),
        ({0: 2, 2: 0}, ["ranks 0 and 2 wait for each other"]),
        ({0: 2, 2: 3, 3: 2, 4: 1}, ["rank 4 waits for rank 1: sleeps", "ranks 2 and 3 wait for each other"]),
    ],
)
def test_who_holds_whom_up(waits, lines):
    assert list(explain(waits, {1: "sleeps"})) == lines


@pytest.mark.parametrize("terminal", [False, True])
def test_it_looks_again_until_it_is_interrupted(terminal, capsys, monkeypatch):
    seen = []

    def find_jobs():
        seen.append(len(seen))
        if len(seen) == 4:
            raise KeyboardInterrupt
        rank = live.Rank(0, 1, "runs", calls=len(seen) * 10, bytes=len(seen) * 10**8)
        return [live.RunningJob(1, "a job", 1, [rank])]

    monkeypatch.setattr(top, "find_jobs", find_jobs)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with contextlib.suppress(KeyboardInterrupt):
        main(["top", "--interval", "0.01"])
    text = capsys.readouterr().out
    looks = re.findall(r"^     0        1 +([\d,]+) +([\d.]+)  in no call$", text, re.MULTILINE)
    assert len(looks) == 2
    for calls, gigabytes in looks:  # of 10 calls in 10 ms or more
        assert 0 < int(calls.replace(",", "")) <= 1000
        assert 0 <= float(gigabytes) <= 10
    assert (text.count("\x1b[H\x1b[2J") == 2) == terminal
    assert ("\x1b" in text) == terminal
