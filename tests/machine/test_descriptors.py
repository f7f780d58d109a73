"""A start raises the limit on file descriptors where it may, and names it where it may not."""

import subprocess
import sys

import pytest

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


JOB = """
import os, resource, sys
import ringcomm
from ringcomm.machine import descriptors

descriptors.provide = lambda *_: None  # as if the estimate were too low
if os.environ["RINGCOMM_RANK"] == "0":
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    ringcomm.init(timeout=30)
except ringcomm.RingcommError as error:
    print(f"rank {os.environ['RINGCOMM_RANK']}: {error}")
    sys.exit(1)
"""


@pytest.mark.slow
def test_the_ranks_that_have_joined_are_told_that_rank_0_is_out_of_descriptors(tmp_path):
    program = tmp_path / "job.py"
    program.write_text(JOB)
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "8", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=25)
    assert run.returncode == 1
    assert "rank 0: no file descriptor is left to " in run.stdout
    for line in run.stdout.splitlines():
        assert "RLIMIT_NOFILE" in line
        assert "rank 0 needs 4 for each rank" in line
