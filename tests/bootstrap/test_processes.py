"""Whether a process that has named itself still runs, and descriptors to watch processes."""

import errno
import os
import subprocess
import sys

import pytest

from ringcomm import RingcommError
from ringcomm.bootstrap import processes
from ringcomm.bootstrap.processes import is_running, open_pidfd, process_id

PROGRAM = "from ringcomm.bootstrap.processes import process_id; print(process_id(), flush=True); input()"


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True) as process:
        process.announced = process.stdout.readline().strip()
        yield process
        process.kill()


def zombie(process):
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def reaped(process):
    process.kill()
    process.wait()


def reused(process):
    namespace, pid, started = process.announced.rsplit(" ", 2)
    process.announced = f"{namespace} {pid} {int(started) - 1}"


@pytest.mark.parametrize("end", [zombie, reaped, reused])
def test_a_process_runs_until_it_has_ended(process, end):
    assert is_running(process.announced)
    end(process)
    assert not is_running(process.announced)


def test_a_process_of_another_namespace_counts_as_running():
    assert is_running("pid:[1] 1 0")


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_only_a_kernel_that_has_or_allows_no_pidfds_passes_silently(monkeypatch, reason):
    def refuse(_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(processes.os, "pidfd_open", refuse)
    if reason == errno.EMFILE:
        with pytest.raises(RingcommError, match="rank 0 has no file descriptor left to watch a process"):
            open_pidfd(os.getpid(), 0)
    else:
        assert open_pidfd(os.getpid(), 0) == -1


def test_this_process_runs():
    assert is_running(process_id())
