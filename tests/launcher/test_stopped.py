"""Ranks that do not go on under `ringcomm run`: it says which are stopped.

With --respawn it ends those that the others left out, and those that never join.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from elastic_programs import ELASTIC

pytestmark = pytest.mark.slow

LAUNCH = """
import sys
from ringcomm.commands.cli import main
from ringcomm.launcher import restarts, supervisor
supervisor.REPORT_STOPPED_AFTER, restarts.EXIT_TIMEOUT, restarts.CHECK_INTERVAL = 0.5, 1.0, 0.1
sys.exit(main())
"""

# Rank 1 does not go on: stopped, or busy. The others leave it out, and take it in again.
PROGRAM = f"""{ELASTIC}
how = sys.argv[1]
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "polite":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if how == "renamed":  # as setproctitle does it: over the environment that the kernel shows
    begin, end = map(int, open("/proc/self/stat").read().split()[49:51])
    ctypes.memset(begin, 0, end - begin)
comm = ringcomm.init(timeout=30)
if restarts == 0:
    if rank == 1:
        time.sleep(60) if how == "busy" else stop()
        time.sleep(60)
    try:
        comm.barrier(timeout=0.3)
    except ringcomm.CollectiveTimeout:
        comm = comm.shrink(timeout=0.3)
    comm = comm.grow(timeout=20)
complete(comm)
"""
SHELL = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable]
SLOW_SHELL = ["sh", "-c", '"$@"; status=$?; sleep 1; exit $status', "sh", sys.executable]


def launch(*arguments, size=3):
    command = [sys.executable, "-c", LAUNCH, "run", "-n", str(size), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder, text, respawn, *arguments, command=(sys.executable,), size=3, status=0):
    """Run a program to its end; return the sorted lines of its ranks, and those of the launcher."""
    (folder / "program.py").write_text(text)
    with launch("--respawn", str(respawn), "--", *command, str(folder / "program.py"), *arguments, size=size) as job:
        out, err = job.communicate(timeout=60)
    assert job.returncode == status, err
    return sorted(out.splitlines()), err.splitlines()


@pytest.mark.parametrize(
    ("how", "command"),
    [
        ("stopped", [sys.executable]),
        ("stopped", SHELL),  # the rank is a child of what was started
        ("deaf", [sys.executable]),
        ("polite", [sys.executable]),
        ("busy", [sys.executable]),
        ("renamed", [sys.executable]),
    ],
    ids=["stopped", "in a script", "deaf", "polite", "busy", "renamed"],
)
def test_a_rank_that_was_left_out_is_ended_and_started_again(how, command, tmp_path):
    out, err = run(tmp_path, PROGRAM, 1, how, command=command)
    assert out == ["[0] 0 0", "[1] 1 1", "[2] 2 0"]
    reason = "did not call shrink" if how == "busy" else "was stopped"
    line = f"ringcomm run: rank 1 {reason}, was left out by the others and ended; restarted (1 of 1)"
    assert err.count(line) == 1, err
    assert any("[0] ringcomm WARNING: shrink left out rank 1" in each for each in err)


NEVER_JOINS = f"""{ELASTIC}
how, again = sys.argv[1], beside("again")
if restarts:
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    again.touch()
    if how == "stopped":
        stop()
    time.sleep(600)
comm = ringcomm.init(timeout=30)
if comm.rank == 1:
    die()
wait_for(again)
"""


@pytest.mark.parametrize("how", ["busy", "stopped", "deaf", "polite"])
def test_a_rank_that_never_joins_is_ended_when_the_others_have_ended(how, tmp_path):
    _, err = run(tmp_path, NEVER_JOINS, 1, how)
    assert [line for line in err if "to continue" not in line] == [
        "ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 1)",
        "ringcomm run: rank 1 was restarted, but no rank is left that it could join",
    ]


# Rank 1 is lost; restarted it is stopped before it has joined. The others try until all are there.
STOPPED_JOINER = f"""{ELASTIC}
when = sys.argv[1]
if restarts == 1 and when == "in its start":
    stop()
if restarts == 1 and when == "with the plan":
    ringcomm.elastic.place_in = stop
if restarts == 1 and when == "when it has connected":
    store.all_gather_facts = stop
comm = ringcomm.init(timeout=30)
if restarts == 0:
    comm = lose(comm)
    while comm.size < size:
        try:
            comm = comm.grow(timeout=30)
        except (ringcomm.PeerLost, ringcomm.CollectiveTimeout):
            comm.barrier()
complete(comm)
"""


@pytest.mark.parametrize(
    ("when", "command"),
    [
        ("in its start", [sys.executable]),
        ("with the plan", [sys.executable]),
        ("when it has connected", [sys.executable]),
        ("in its start", SHELL),
    ],
)
def test_a_rank_that_is_stopped_while_it_joins_is_ended_and_started_again(when, command, tmp_path):
    out, err = run(tmp_path, STOPPED_JOINER, 2, when, command=command)
    assert out == ["[0] 0 0", "[1] 1 2", "[2] 2 0"]
    line = "ringcomm run: rank 1 was stopped and ended before it had joined; restarted in 1 s (2 of 2)"
    assert [line for line in err if "ringcomm run" in line][1:] == [line]


# Rank 1 is lost; when it waits to join, rank 0 is stopped, which is the last one or keeps rank 2 waiting.
STOPPED_MEMBER = f"""{ELASTIC}
waits = beside("waits")
if restarts == 1 and rank == 1:
    waits.touch()
comm = ringcomm.init(timeout=0.5 if restarts == 1 and rank == 1 else 30)
if restarts == 0:
    comm = lose(comm)
    if rank == 0:
        wait_for(waits)
        stop()
    try:
        comm.barrier()
    except ringcomm.PeerLost:
        comm = comm.shrink()
    while comm.size < size:
        comm = comm.grow(timeout=20)
complete(comm)
"""


@pytest.mark.parametrize(
    "command", [[sys.executable], SHELL, SLOW_SHELL], ids=["alone", "in a script", "in a slow one"]
)
def test_the_last_rank_that_is_connected_is_ended_if_it_is_stopped_and_others_wait_for_it(command, tmp_path):
    _, err = run(tmp_path, STOPPED_MEMBER, 2, command=command, size=2, status=128 + signal.SIGTERM)
    end = "rank 0 was stopped while another rank waited for it, and was ended, and no rank is left that could continue"
    assert f"ringcomm run: {end}" in err


def test_a_stopped_rank_that_one_waits_too_long_for_is_ended_and_started_again(tmp_path):
    out, err = run(tmp_path, STOPPED_MEMBER, 3)
    assert out == ["[0] 0 1", "[1] 1 2", "[2] 2 0"], err
    line = "ringcomm run: rank 0 was stopped while another rank waited for it, and was ended; restarted (1 of 3)"
    assert line in err


# The script that runs rank 1 is killed.
LOSES_ITS_SCRIPT = f"""{ELASTIC}
comm = ringcomm.init(timeout=20)
if restarts == 0:
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    comm = shrunk(comm).grow(timeout=20)
complete(comm)
"""


def test_a_rank_ends_with_the_script_that_runs_it(tmp_path):
    out, err = run(tmp_path, LOSES_ITS_SCRIPT, 1, command=SHELL)
    assert out == ["[0] 0 0", "[1] 1 1", "[2] 2 0"]
    assert err == ["ringcomm run: rank 1 was killed by SIGKILL; restarted (1 of 1)"]


def test_ringcomm_run_says_once_which_ranks_are_stopped(tmp_path):
    (tmp_path / "program.py").write_text(
        f"import os, time\nprint(os.getpid())\nwhile not os.path.exists({str(tmp_path / 'ends')!r}): time.sleep(0.01)\n"
    )
    with launch(str(tmp_path / "program.py")) as job:
        pids = dict(job.stdout.readline().split() for _ in range(3))
        stopped = [int(pids[f"[{rank}]"]) for rank in (0, 2)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        line = job.stderr.readline()
        time.sleep(1)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        (tmp_path / "ends").touch()
        rest = job.stderr.read()
    cure = f"kill -CONT {stopped[0]} {stopped[1]}"
    assert line == f"ringcomm run: ranks 0 and 2 are stopped; to continue: {cure}\n"
    assert (job.returncode, rest) == (0, "")
