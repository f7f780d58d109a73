"""`ringcomm.launch` and `ringcomm run` where a program or the system keeps from them what they usually have."""

import importlib
import itertools
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import Pipe

import pytest

import harness
import ringcomm

pytestmark = pytest.mark.slow

launch_module = importlib.import_module("ringcomm.launcher.launch")
PROGRAM = """
import os, signal, sys
import numpy as np, ringcomm

def fn(comm):
    print("printed by a rank", flush=True)
    return int(comm.all_reduce(np.array(comm.rank)))

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.{disposition})
    results = ringcomm.launch(fn, 2, timeout=20)
    with open(sys.argv[1], "w") as file:
        print(results, file=file)
"""


@pytest.fixture
def shell(tmp_path):
    """Return a function that writes a program and runs a shell command with its path in $program."""

    def run(command, text, **variables):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(text))
        settings = {"program": program, "python": sys.executable, "out": tmp_path / "out", **variables}
        lines = [*(f"{name}='{value}'" for name, value in settings.items()), command]
        return subprocess.run("\n".join(lines), shell=True, capture_output=True, text=True, timeout=harness.JOB)

    return run


def test_a_program_may_ignore_the_end_of_its_children(shell, tmp_path):
    ended = shell("$python $program $out", PROGRAM.format(disposition="SIG_IGN"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "[1, 1]\n"


BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_the_parent_may_have_blocked_all_signals(shell, tmp_path):
    ended = shell('$python -c "$blocked" $program $out', PROGRAM.format(disposition="SIG_DFL"), blocked=BLOCKED)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "[1, 1]\n"


def test_ranks_inherit_the_blocked_signals_of_ringcomm_run_which_itself_needs_them(shell):
    text = """
        import os, signal
        os.kill(os.getppid(), signal.SIGTERM)
        print(signal.sigwait({signal.SIGTERM}).name, signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    """
    ended = shell('$python -c "$blocked" -m ringcomm run -n 2 $program', text, blocked=BLOCKED)
    assert sorted(ended.stdout.splitlines()) == ["[0] SIGTERM True", "[1] SIGTERM True"]
    assert ended.returncode == 0


@pytest.mark.parametrize("command", ["$python $program $out", "$python -m ringcomm run -n 2 true"])
def test_a_limit_on_descriptors_that_is_too_low_is_named_with_what_is_needed(shell, command):
    ended = shell(f"ulimit -n 12\n{command}", PROGRAM.format(disposition="SIG_DFL"))
    pattern = r"the launcher of 2 ranks needs \d+ file descriptors \(\d+ are open\), but its hard limit is 12: raise it"
    assert re.search(pattern, ended.stderr), ended.stderr
    assert ended.returncode != 0


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_program_may_have_closed_its_standard_streams(shell, tmp_path, closed):
    ended = shell(f"$python $program $out {closed}", PROGRAM.format(disposition="SIG_DFL"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "[1, 1]\n"
    assert ended.stdout == ("" if " >&-" in f" {closed}" else "printed by a rank\n" * 2)


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [(">&-", [], ["[0] err", "[1] err"]), ("2>&-", ["[0] out", "[1] out"], []), ("<&- >&- 2>&-", [], [])],
)
def test_what_ranks_print_to_a_closed_stream_is_dropped(shell, closed, out, err):
    text = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ended = shell(f"$python -m ringcomm run -n 2 $program {closed}", text)
    assert ended.returncode == 3
    assert sorted(ended.stdout.splitlines()) == out
    assert sorted(line for line in ended.stderr.splitlines() if line.startswith("[")) == err


def test_a_command_may_print_to_a_closed_stream(shell):
    ended = shell("$python -X dev -m ringcomm algorithms >&-", "")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_deleted_directory_is_named(shell):
    text = """
        import os, tempfile, ringcomm
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        print(ringcomm.launch(lambda comm: comm.rank, 2, world="threads"))
        ringcomm.launch(print, 2)
    """
    ended = shell("$python $program", text)
    assert ended.stdout == "[0, 1]\n"
    reason = "the current directory, in which the ranks would start, has been deleted: change to another (os.chdir)"
    assert ended.stderr.endswith(f"ringcomm.errors.ArgumentError: {reason}\n")


def leave_a_thread_on_1(comm):
    if comm.rank == 1:
        threading.Thread(target=threading.Event().wait, name="left over").start()
    return comm.rank


def test_a_thread_that_a_function_leaves_running_does_not_hold_up_its_results(monkeypatch, caplog):
    monkeypatch.setattr(launch_module, "EXIT_TIMEOUT", 1.0)
    assert ringcomm.launch(leave_a_thread_on_1, 3) == [0, 1, 2]
    expected = "rank 1 returned, but did not exit within 1 s, and is killed; threads that it left running: 'left over'"
    assert caplog.messages == [expected]


def test_exits_that_take_long_together_are_waited_for(monkeypatch, caplog):
    """Three ranks exit, 4 s after each other."""
    clock = itertools.count(0, 4.0)
    now = next(clock)

    def wait(connections, timeout):
        nonlocal now
        if timeout is not None and timeout < 4:
            return []
        now = next(clock)
        return connections

    control, server = Pipe()
    receivers = []
    for rank in range(3):
        receiver, sender = Pipe(duplex=False)
        sender.send_bytes(pickle.dumps(launch_module.RankResult(rank, rank)))
        server.send((rank, 0, 0.0))
        receivers.append(receiver)
        sender.close()
    monkeypatch.setattr(launch_module, "wait", wait)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    results = launch_module._collect(None, control, receivers)
    monkeypatch.undo()
    assert [result.value for result in results] == [0, 1, 2]
    assert not caplog.messages
    for end in (control, server, *receivers):
        end.close()


REFUSING = """
import os, subprocess
def refuse(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = {fork}
def refuse_true(*args, fork_exec=subprocess._fork_exec):
    return refuse() if "true" in args[0] else fork_exec(*args)
subprocess._fork_exec = {fork_exec}
"""
LIMITS = "raise the limit on threads and processes (RLIMIT_NPROC, pids.max of the control group) or memory (RLIMIT_AS)"


@pytest.mark.parametrize(
    ("command", "refused", "what"),
    [
        ("$python $program $out", {"fork": "refuse"}, "rank 0 of 2"),
        ("$python $program $out", {"fork_exec": "refuse"}, "the process that forks the ranks"),
        ("$python -m ringcomm run -n 2 true", {"fork_exec": "refuse"}, "the process that ends the ranks"),
        ("$python -m ringcomm run -n 2 true", {"fork_exec": "refuse_true"}, "rank 0"),
    ],
)
def test_a_process_that_the_system_refuses_is_named_with_the_limits(shell, tmp_path, command, refused, what):
    usual = {"fork": "os.fork", "fork_exec": "subprocess._fork_exec"}
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(**usual | refused))
    start = time.monotonic()
    ended = shell(f"export PYTHONPATH={tmp_path}\n{command}", PROGRAM.format(disposition="SIG_DFL"))
    assert f"cannot start {what} (Resource temporarily unavailable): {LIMITS}\n" in ended.stderr
    assert ended.returncode != 0
    assert time.monotonic() - start < launch_module.EXIT_TIMEOUT
