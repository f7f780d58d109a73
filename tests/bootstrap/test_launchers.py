"""One program under every launcher: `ringcomm run`, torchrun, and the mpirun of Open MPI and of MPICH."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import harness
from harness import mpi_world

PROGRAM = """
import sys
import numpy as np, ringcomm

with ringcomm.init(timeout=20) as comm:
    assert comm.all_gather(np.array(comm.rank)).tolist() == list(range(comm.size))
    x = np.full(300_001, comm.rank + 1.0)
    comm.all_reduce(x)
    assert (x == comm.size * (comm.size + 1) / 2).all()
    with comm.split(comm.rank % 2, key=-comm.rank) as group:
        members = group.all_gather_object(comm.rank)
        assert members == sorted(members, reverse=True)
        assert members[group.rank] == comm.rank
    sys.stdout.write(f"rank {comm.rank} of {comm.size} with {members}\\n")
    sys.stdout.flush()

with ringcomm.init(timeout=20) as comm:  # a second startup, which a fast rank may have begun already
    comm.barrier()
"""
EXPECTED = ["rank 0 of 3 with [2, 0]", "rank 1 of 3 with [1]", "rank 2 of 3 with [2, 0]"]


def start(command, settings, program):
    """Return the sorted output lines of the command; fail unless it succeeds."""
    command = [*map(str, command), program]
    ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=harness.JOB)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(line.removeprefix(f"[{line[1:2]}] ") for line in ended.stdout.splitlines())


def command_of(launcher):
    """Return the command of a launcher for three ranks, and its settings."""
    python = [sys.executable, "-P", "-m"]
    if launcher == "ringcomm run":
        return [*python, "ringcomm", "run", "-n", "3"], {}
    if launcher == "torchrun":
        pytest.importorskip("torch")
        return [*python, "torch.distributed.run", "--standalone", "--nproc-per-node=3"], {}
    mpi_world.skip_without(launcher)
    mpirun, settings = mpi_world.LIBRARIES[launcher]()
    return [*mpirun, "-n", "3", sys.executable], settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["ringcomm run", "torchrun", *(pytest.param(library, marks=pytest.mark.mpi) for library in mpi_world.LIBRARIES)],
)
def test_the_ranks_of_two_jobs_at_once_find_each_other_under_every_launcher(launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command, settings = command_of(launcher)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda _: start(command, settings, program), range(2))) == [EXPECTED] * 2
