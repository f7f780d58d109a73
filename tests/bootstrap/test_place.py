"""The place of a rank, from the environment that its launcher set."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm import ArgumentError
from ringcomm.bootstrap.place import Place, find_place
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.store import job_store

OURS = {"RINGCOMM_RANK": "1", "RINGCOMM_SIZE": "4", "RINGCOMM_JOB": "j", "RINGCOMM_JOB_SECRET": "secret"}
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
SECRET = 32 * "5a"
SRUN_ON_HOSTS = {
    **SRUN,
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "RINGCOMM_JOB_SECRET": SECRET,
}
ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OURS, Place(1, 4, "ringcomm run/j", "secret", "ringcomm run")),
        (
            {**OURS, "RINGCOMM_STORE": "10.0.0.1:29500"},
            Place(1, 4, "ringcomm run/j", "secret", "ringcomm run", hosts=True, store="10.0.0.1:29500"),
        ),
        (
            {**OURS, "RINGCOMM_STORE": "unix:name"},
            Place(1, 4, "ringcomm run/j", "secret", "ringcomm run", store="unix:name"),
        ),
        (TORCHRUN, Place(1, 4, "torchrun/none/29500/2", "", "torchrun", torch=True)),
        (OPEN_MPI, Place(1, 4, "Open MPI/prterun-host-17@1", "", "Open MPI", mpi=True)),
        (SRUN, Place(1, 4, "srun/7/0", "", "srun", mpi=True)),
        (
            SRUN_ON_HOSTS,
            Place(1, 4, "srun/7/0", SECRET, "srun", hosts=True, rank_0="node08:20007", last_host="node09"),
        ),
        (
            {**SRUN_ON_HOSTS, "MASTER_ADDR": "10.0.0.8", "MASTER_PORT": "29500"},
            Place(1, 4, "srun/7/0", SECRET, "srun", hosts=True, rank_0="10.0.0.8:20007"),
        ),
        (
            ENV,
            Place(
                *(1, 4, "a launcher of torch.distributed/10.0.0.1/29500", "", "a launcher of torch.distributed"),
                hosts=True,
                torch=True,
            ),
        ),
    ],
    ids=lambda value: getattr(value, "launcher", ""),
)
def test_the_place_comes_from_the_variables_of_the_launcher(environ, place):
    assert find_place(environ) == place


def test_without_a_launcher_there_is_one_rank():
    place = find_place({"PATH": "/bin"})
    assert (place.rank, place.size, place.launcher) == (0, 1, "none")


def test_a_slurm_batch_script_is_one_rank():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).size == 1


def test_the_innermost_launcher_wins():
    assert find_place({**SRUN, **TORCHRUN, "RANK": "2"}).rank == 2
    assert find_place({**SRUN, **TORCHRUN, **OPEN_MPI, **OURS, "RINGCOMM_RANK": "3"}).rank == 3
    assert find_place({**ENV, "RANK": "2", **OPEN_MPI}).rank == 1


def test_the_actors_of_ray_have_a_place_of_their_own_in_the_step_that_has_started_ray():
    ray_start = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    place = find_place({**ray_start, **ENV, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"})
    assert (place.rank, place.size, place.torch) == (1, 4, True)


@pytest.mark.parametrize("stray", [{"RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, ENV])
def test_variables_that_any_program_may_set_do_not_mark_torchrun(stray):
    assert find_place({**OPEN_MPI, **stray}).launcher == "Open MPI"


@pytest.mark.parametrize(
    "alone", [{"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {**ENV, "RANK": "0", "WORLD_SIZE": "1"}]
)
def test_a_world_of_one_rank_needs_nothing_else(alone):
    place = find_place(alone)
    assert (place.rank, place.size, place.hosts) == (0, 1, False)


@pytest.mark.parametrize("inner", [OURS, TORCHRUN, OPEN_MPI], ids=["ringcomm run", "torchrun", "Open MPI"])
def test_a_launcher_with_a_missing_variable_is_skipped(inner):
    for name in inner.keys() - {"RINGCOMM_JOB_SECRET"}:
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


def test_a_place_round_trips_through_the_environment():
    for store in ("", "unix:name", "10.0.0.1:29500"):
        place = Place(2, 3, "job", "the secret", store=store)
        found = find_place(place.environment())
        assert (found.rank, found.size, found.secret, found.store) == (2, 3, "the secret", store)
        assert found.hosts == (store == "10.0.0.1:29500")
        assert place.environment().keys() >= os.environ.keys()


def test_a_job_inside_a_rank_of_several_hosts_is_on_one(monkeypatch):
    monkeypatch.setenv("RINGCOMM_STORE", "10.0.0.1:29500")
    assert not find_place(Place(0, 2, "inner").environment()).hosts


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
        (MPICH, "no ancestor of this process is MPICH's hydra"),
        ({"RANK": "3"}, "RANK is set without WORLD_SIZE and MASTER_ADDR and MASTER_PORT; a launcher of torch"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set without MASTER_ADDR and MASTER_PORT; a launcher of torch"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "WORLD_SIZE=2 is set without RANK, MASTER_ADDR and MASTER_PORT"),
        ({**ENV, "RANK": "4"}, "expected 0 <= rank < size, got RANK=4, WORLD_SIZE=4"),
        (
            {"FLUX_TASK_RANK": "1"},
            "FLUX_TASK_RANK=1 is of a launcher that ringcomm does not know: start the ranks with",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0 is of a launcher that ringcomm does not know"),
        ({**SRUN_ON_HOSTS, "RINGCOMM_JOB_SECRET": "abc"}, "the secret in RINGCOMM_JOB_SECRET has fewer than 32 bytes"),
        ({**SRUN_ON_HOSTS, "SLURM_STEP_NODELIST": "node[8"}, "SLURM_STEP_NODELIST: expected a list of hosts such as"),
        ({**SRUN_ON_HOSTS, "SLURM_JOB_ID": "seven"}, "expected integers, got SLURM_JOB_ID=seven, SLURM_STEP_ID=0"),
        (
            {name: value for name, value in SRUN_ON_HOSTS.items() if name != "SLURM_STEP_NODELIST"},
            "SLURM_STEP_NUM_TASKS is set without SLURM_STEP_NODELIST; srun sets them all",
        ),
    ],
)
def test_variables_that_give_no_place_are_named(environ, names):
    with pytest.raises(ArgumentError) as raised:
        find_place(environ)
    assert names in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (OURS, "RINGCOMM_SIZE"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2000000000"}, "WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_a_size_beyond_reason_is_refused(environ, name):
    with pytest.raises(ArgumentError, match=f"expected at most 65536 ranks, got {name}=2000000000$"):
        find_place({**environ, name: "2000000000"})
    assert find_place({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "65536"}).size == 65536


def test_a_job_name_may_be_any_bytes():
    job = os.fsdecode(b"\xe9t\xe9")
    places = [find_place({**OURS, "RINGCOMM_JOB": job, "RINGCOMM_RANK": rank, "RINGCOMM_SIZE": "2"}) for rank in "01"]

    def exchange(place):
        with job_store(place, 20) as store:
            return store.all_gather(Contribution("here", place.rank, 2, b"%d" % place.rank), 20)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, places)) == [b"[0,1]"] * 2


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_mpi_ranks_may_be_on_several_hosts(environ):
    place = find_place(environ)
    assert place.mpi
    assert place.hosts
