"""A start raises the limit on file descriptors where it may, and names it where it may not."""

import resource
import subprocess
import sys

import pytest

from harness.jobs import run_job
from ringcomm import RingcommError
from ringcomm.machine import descriptors

START = """
import resource, sys
import ringcomm
from ringcomm.machine import descriptors


soft, hard, rank, size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    descriptors.provide(rank, size)
except ringcomm.RingcommError as error:
    print(error)
else:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def provide(*numbers):
    command = [sys.executable, "-c", START, *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_soft_limit_is_raised_as_far_as_needed():
    assert 230 < int(provide(64, 1024, 0, 50)) < 260
    assert 130 < int(provide(64, 1024, 1, 50)) < 160  # only rank 0 holds connections
    assert int(provide(512, 1024, 0, 50)) == 512


def test_a_hard_limit_that_is_too_low_is_named_with_what_is_needed():
    text = provide(64, 200, 0, 50)
    assert text.startswith("rank 0 of 50 needs 2")
    assert "its hard limit is 200: raise it (RLIMIT_NOFILE, ulimit -Hn)" in text


def test_a_soft_limit_that_is_reached_is_raised_up_to_the_hard_one(monkeypatch):
    limits = [100, 140]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert [(descriptors.raise_limit(), limits[0]) for _ in range(3)] == [(True, 132), (True, 140), (False, 140)]


def test_a_rank_that_starts_with_some_of_its_job_is_named_by_its_rank_there(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(RingcommError, match=r"^rank 7 needs ") as caught:
        descriptors.provide(0, 50, range(7, 57))
    assert caught.value.rank == 7


JOB = """
import os, resource, sys
import ringcomm
from ringcomm.machine import descriptors

descriptors.provide = lambda *_: None  # as if the estimate were too low
if os.environ["RINGCOMM_RANK"] == "0":
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 12, max(taken) + 12))
try:
    ringcomm.init(timeout=30)
except ringcomm.RingcommError as error:
    print(f"rank {os.environ['RINGCOMM_RANK']}: {error}")
    sys.exit(1)
"""


@pytest.mark.slow
def test_the_ranks_that_have_joined_are_told_that_rank_0_is_out_of_descriptors(tmp_path):
    run = run_job(tmp_path, 8, JOB, status=1)
    assert "rank 0: rank 0 has no file descriptor left to " in run.stdout
    for line in run.stdout.splitlines():
        assert "RLIMIT_NOFILE" in line
        assert "rank 0 has no file descriptor" in line
        assert "it needs 2 for each rank (4 on the first of a host)" in line


def test_a_client_names_itself_and_what_it_needs():
    error = descriptors.exhausted(3, "to watch a process")
    assert error.rank == 3
    assert str(error).startswith("rank 3 has no file descriptor left to watch a process: its limit (RLIMIT_NOFILE) is ")
    assert "it needs 2 for each rank" in str(error)


def test_a_thread_does_not_undo_what_another_has_raised(monkeypatch):
    limits = [64, 4096]

    def opened():  # reads a folder: other threads run meanwhile
        limits[0] = max(limits[0], 1000)
        return 10

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    monkeypatch.setattr(descriptors, "_opened", opened)
    descriptors.provide(0, 50)
    assert limits == [1000, 4096]
