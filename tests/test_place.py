"""The place of a rank, as launchers tell it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm import ArgumentError
from ringcomm.place import Place, find_place

OURS = {"RINGCOMM_RANK": "1", "RINGCOMM_SIZE": "4", "RINGCOMM_JOB": "j", "RINGCOMM_NONCE": "secret"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SAY_PLACE = "from ringcomm.place import find_place as f; p = f(); print(p.rank, p.size, p.job, p.launcher, sep='|')"


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OURS, Place(1, 4, "ringcomm run/j", "secret", "ringcomm run")),
        (TORCHRUN, Place(1, 4, "torchrun/none/29500/2", "", "torchrun")),
        (OPEN_MPI, Place(1, 4, "Open MPI/prterun-host-17@1", "", "Open MPI", mpi=True)),
        (SRUN, Place(1, 4, "srun/7/0", "", "srun", mpi=True)),
    ],
    ids=lambda value: getattr(value, "launcher", ""),
)
def test_a_place_is_what_the_launcher_says(environ, place):
    assert find_place(environ) == place


def test_without_a_launcher_there_is_one_rank():
    place = find_place({"PATH": "/bin"})
    assert (place.rank, place.size, place.launcher) == (0, 1, "none")


def test_a_batch_script_of_slurm_is_alone():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).size == 1


def test_the_innermost_launcher_counts():
    assert find_place({**SRUN, **TORCHRUN, "RANK": "2"}).rank == 2
    assert find_place({**SRUN, **TORCHRUN, **OURS, "RINGCOMM_RANK": "3"}).rank == 3


@pytest.mark.parametrize("stray", [{"RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}])
def test_variables_that_any_program_may_set_are_not_torchrun(stray):
    assert find_place({**OPEN_MPI, **stray}).launcher == "Open MPI"
    assert find_place(stray).launcher == "none"


def test_a_world_size_that_no_launcher_set_is_told_to_be_ignored(caplog):
    assert find_place({"RANK": "0", "WORLD_SIZE": "2"}).size == 1
    assert "this rank is alone" in caplog.text


@pytest.mark.parametrize("inner", [OURS, TORCHRUN, OPEN_MPI], ids=["ringcomm run", "torchrun", "Open MPI"])
def test_a_launcher_that_did_not_set_all_its_variables_is_passed_over(inner):
    for name in inner.keys() - {"RINGCOMM_NONCE"}:
        incomplete = {key: value for key, value in inner.items() if key != name}
        assert find_place({**incomplete, **SRUN}).launcher == "srun"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (OURS, ["RINGCOMM_JOB"]),
        (TORCHRUN, ["TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]),
        (OPEN_MPI, ["PMIX_NAMESPACE"]),
        (SRUN, ["SLURM_JOB_ID", "SLURM_STEP_ID"]),
    ],
    ids=["ringcomm run", "torchrun", "Open MPI", "srun"],
)
def test_two_jobs_of_a_user_have_different_names(environ, names):
    for name in names:
        assert find_place(environ).job != find_place({**environ, name: "another"}).job


def test_a_place_survives_the_way_through_the_environment():
    place = Place(2, 3, "job", "nonce")
    found = find_place(place.environment())
    assert (found.rank, found.size, found.nonce) == (2, 3, "nonce")
    assert place.environment().keys() >= os.environ.keys()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**OURS, "RINGCOMM_RANK": "4"}, "RINGCOMM_RANK=4, RINGCOMM_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1, WORLD_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=many"),
        ({"RINGCOMM_RANK": "1", "RINGCOMM_JOB": "j"}, "RINGCOMM_RANK is set without RINGCOMM_SIZE; ringcomm run sets"),
        (
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "1"},
            "_RUN_ID is set without WORLD_SIZE and LOCAL_WORLD_SIZE and MASTER",
        ),
    ],
)
def test_contradicting_variables_are_named(environ, names):
    with pytest.raises(ArgumentError) as raised:
        find_place(environ)
    assert names in str(raised.value)


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_ranks_of_mpi_may_be_on_several_hosts(environ):
    place = find_place(environ)
    assert place.mpi
    assert place.hosts


def test_ranks_of_torchrun_on_several_hosts_are_told_both_cures():
    with pytest.raises(ArgumentError, match=r"mpirun or srun, or under torchrun ringcomm\.torch"):
        find_place({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"})


def test_mpich_without_its_hydra_is_an_error():
    with pytest.raises(ArgumentError, match="hydra"):
        find_place(MPICH)


@pytest.mark.mpi
@pytest.mark.slow
def test_the_ranks_of_one_mpirun_have_one_job_and_those_of_the_next_another():
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent)
    if mpirun is None:
        pytest.skip("no mpirun beside this Python")
    environ = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    # A shell between the launcher and the rank is nothing special.
    command = [mpirun, "-n", "3", "sh", "-c", f'"{sys.executable}" -c "{SAY_PLACE}"; true']
    jobs = set()
    for _ in range(2):
        output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
        places = sorted(line.split("|") for line in output.splitlines())
        assert [place[:2] for place in places] == [["0", "3"], ["1", "3"], ["2", "3"]]
        assert len({place[2] for place in places}) == 1
        jobs.add(places[0][2])
    assert len(jobs) == 2
