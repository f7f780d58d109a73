"""The watch on processes that announce themselves through a store, which may hold announcements of earlier starts."""

import errno
import os
import subprocess
import sys
from contextlib import closing

import pytest

from ringcomm import PeerLost, RingcommError
from ringcomm.bootstrap import process_watch
from ringcomm.bootstrap.process_watch import ProcessWatch, process_id

PROGRAM = "from ringcomm.bootstrap.process_watch import process_id; print(process_id(), flush=True); input()"


@pytest.fixture
def watch():
    with closing(ProcessWatch(0)) as watch:
        yield watch


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


ENDS = [zombie, reaped, reused]


@pytest.mark.parametrize("end", ENDS)
def test_a_process_of_an_earlier_start_is_ignored(watch, process, end):
    end(process)
    watch.add(1, process.announced, now=False)
    watch.check()


@pytest.mark.parametrize("end", ENDS)
def test_a_process_of_this_start_that_has_died_is_lost(watch, process, end):
    end(process)
    watch.add(1, process.announced, now=True)
    with pytest.raises(PeerLost, match=rf"rank 1 \(process {process.pid}\) exited during startup"):
        watch.check()


def test_a_process_that_does_not_know_its_start_time_is_watched(watch, process):
    namespace, pid, _ = process.announced.rsplit(" ", 2)
    watch.add(1, f"{namespace} {pid} {process_watch.UNKNOWN}", now=True)
    watch.check()
    reaped(process)
    with pytest.raises(PeerLost):
        watch.check()


def test_a_death_is_not_forgotten_when_the_process_is_announced_again(watch, process):
    watch.add(1, process.announced, now=False)
    watch.check()
    reaped(process)
    for now in (False, True):
        watch.add(1, process.announced, now=now)
        with pytest.raises(PeerLost):
            watch.check()
    watch.remove(1)
    watch.check()


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_only_a_kernel_that_has_or_allows_no_pidfds_passes_silently(watch, monkeypatch, reason):
    def refuse(_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(process_watch.os, "pidfd_open", refuse)
    if reason == errno.EMFILE:
        with pytest.raises(RingcommError, match="rank 0 has no file descriptor left to watch a process"):
            watch.add(1, process_id(), now=True)
    else:
        watch.add(1, process_id(), now=True)
    watch.check()
