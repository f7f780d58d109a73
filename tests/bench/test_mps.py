"""benchmarks/gpu/under_mps.py, with a program that stands for nvidia-cuda-mps-control."""

import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from gpu import under_mps as mps

import harness
from ringcomm import RingcommError

# As the real one: -d returns when a daemon in a session of its own has its pid file; without -d it passes commands on.
CONTROL = f"""#!{sys.executable}
import os, signal, subprocess, sys
pid_file = os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/nvidia-cuda-mps-control.pid"
if sys.argv[1:] == ["-d"]:
    # BEFORE
    daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open(pid_file, "w").write(str(daemon.pid))
    open(os.environ["STARTED"], "a").write(str(daemon.pid) + "\\n")
else:
    assert sys.stdin.read() == "quit\\n"
    # QUIT
"""
KILLS = "os.kill(int(open(pid_file).read()), signal.SIGTERM)"


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Return a function that puts a program in PATH, with what it does first and at the end."""
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))

    def install(before="", at_end=KILLS):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / mps.PROGRAM
        program.write_text(CONTROL.replace("# BEFORE", before).replace("# QUIT", at_end))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return lambda: [int(line) for line in started.read_text().split()] if started.exists() else []

    return install


def ended(pids):
    deadline = time.monotonic() + harness.OPERATION
    while any(mps.runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.01)
    return bool(pids)


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RingcommError])
def test_mps_runs_in_a_folder_of_its_own_until_the_end_of_the_block(control, end):
    pids = control()
    with pytest.raises(end) if end else nullcontext(), mps.started_mps() as clients:
        assert {*clients} == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert all(Path(folder).is_dir() for folder in clients.values())
        assert len(pids()) == 1
        assert mps.runs(pids()[0])
        if end:
            raise end("why")
    assert ended(pids())
    assert not any(Path(folder).exists() for folder in clients.values())


def test_a_daemon_that_does_not_quit_is_killed(control, monkeypatch):
    monkeypatch.setattr(mps, "QUIT_TIMEOUT", 0.1)
    pids = control(at_end="import time; time.sleep(60)")
    with mps.started_mps():
        pass
    assert ended(pids())


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.exit('the user may not start a daemon')", "status 1: the user may not start a daemon"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "status -9: it printed nothing"),
        ("import time; time.sleep(60)", "did not start MPS within 0.5 s"),
    ],
    ids=["refuses", "crashes", "hangs"],
)
def test_mps_that_does_not_start_is_reported_in_a_sentence(control, monkeypatch, before, message):
    monkeypatch.setattr(mps, "START_TIMEOUT", 0.5)
    pids = control(before)
    with pytest.raises(RingcommError, match=re.escape(message)), mps.started_mps():
        pytest.fail("it has started")
    assert not pids()
