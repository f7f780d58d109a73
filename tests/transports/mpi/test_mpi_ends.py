"""How jobs under MPI exit: normally, after a failure, after a rank dies. None hangs."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import harness
from harness import mpi_world
from harness.failures import check_usable, outcomes, raised, until_broken
from ringcomm import CollectiveTimeout, PeerLost, RingcommError

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def worlds(*usual):
    return pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(*usual, layouts=("01", "0011")))


LARGE = 300_001


def leave_unsent(comm):
    """Rank 0 sends messages that no rank receives, and begins to send large ones; then all close."""
    check_usable(comm)
    if comm.rank == 0:
        for peer in range(1, comm.size):
            comm.send(np.ones(1 << 11), peer)
            comm.send(np.ones(1 << 20), peer, async_op=True)
    comm.recv(np.ones(1), comm.rank, async_op=True)
    with suppress(PeerLost):  # a rank that has left needs no message any more, and rank 0 may notice that first
        comm.barrier()


def time_out(comm):
    if comm.rank == 1:
        return until_broken(comm).rank
    return raised(CollectiveTimeout, lambda: comm.all_reduce(np.ones(LARGE), timeout=0.1)).rank


@worlds(("mpich", "0011"))
def test_a_job_with_unreceived_messages_exits_normally(library, layout):
    with harness.world(len(layout), library) as pool:
        pool.run(mpi_world.within, (layout, {}, leave_unsent, ()))
        assert pool.end() == 0, pool.output()


@worlds(("openmpi", "0011"), ("mpich", "01"))
def test_a_failure_that_leaves_nothing_in_flight_does_not_end_the_job(library, layout):
    with harness.world(len(layout), library) as pool:
        assert pool.run(mpi_world.within, (layout, {}, time_out, ())) == [1] * len(layout)
        assert pool.end() == 0, pool.output()


def stall(comm):
    """Rank 1 stops in the middle of a large call."""
    x = np.ones(1 << 22)
    comm.barrier()
    if comm.rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(1000))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    raised(CollectiveTimeout, lambda: [comm.all_reduce(x, timeout=0.5) for _ in iter(int, 1)])


@worlds(("openmpi", "01"))
def test_transfers_that_do_not_end_end_the_job_with_mpi_abort(library, layout):
    with harness.world(len(layout), library) as pool:
        pool.start(mpi_world.within, (layout, {}, stall, ()))
        assert pool.receive(0).error is None
        assert pool.end() != 0
        output = pool.output()
    assert "ringcomm WARNING: MPI_Abort: " in output
    assert "Traceback" not in output


def call_until_the_victim_dies(comm, victim, collective):
    x = np.ones((comm.size, LARGE), np.float32)
    comm.barrier()
    if comm.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        getattr(comm, collective)(x)


@pytest.mark.parametrize(
    ("library", "layout", "victim", "collective"),
    [
        ("openmpi", "0011", 3, "broadcast"),
        ("mpich", "0001", 1, "reduce_scatter"),
        pytest.param("openmpi", "0123", 0, "all_reduce", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_rank_ends_the_job_or_is_named(library, layout, victim, collective):
    with harness.world(mpi_world.SIZE, library) as pool:
        args = layout, {"timeout": 2.0}, call_until_the_victim_dies, (victim, collective)
        answers = {rank: answer for rank, answer, _ in outcomes(pool, mpi_world.within, *args)}
        assert pool.end() != 0
    assert isinstance(answers.pop(victim), ConnectionError)
    assert all(isinstance(answer, RingcommError | ConnectionError) for answer in answers.values())


# --- Programs ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import signal, sys, time
import numpy as np, ringcomm
from mpi4py import MPI
from harness import mpi_world

with open(sys.argv[2], "a") as names:
    print(*mpi_world.shared_files(), sep="\\n", file=names)
label = sys.argv[1][MPI.COMM_WORLD.rank]
"""
INITIALIZES = """
comm = ringcomm.init(20, ringcomm.Config(host_id=label))
x = np.ones(300_001)
comm.all_reduce(x)
"""
IS_INTERRUPTED = """
from ringcomm.transports.mpi import start

def copy(comm, timeout, copy=start.duplicate):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return copy(comm, timeout)

if MPI.COMM_WORLD.rank == 0:
    start.duplicate = copy
elif MPI.COMM_WORLD.rank == 1:
    time.sleep(1000)
"""
RAISES = """
if comm.rank == 1:
    raise ZeroDivisionError("on purpose")
"""
EXITS = """
sys.exit(5 * (comm.rank == 1))
"""
CONTINUES = """
comm.all_reduce(x)
"""


def ended(library, text, layout, folder):
    """Run a program; return its exit status and output."""
    mpi_world.skip_without(library)
    program, names = folder / "program.py", folder / "names"
    program.write_text(text)
    start = mpi_world.start(library, len(layout), PYTHONPATH=str(Path(__file__).parents[2]))
    with open(folder / "output", "w+") as output:
        with start(output, str(program), layout, str(names)) as mpirun:
            status = mpirun.wait(harness.OPERATION)
        for path in {*names.read_text().split()}:  # MPI_Abort leaves them
            Path(path).unlink(missing_ok=True)
        output.seek(0)
        return status, output.read()


@worlds(("openmpi", "0011"))
def test_a_program_that_does_not_close_its_communicator_exits_normally(library, layout, tmp_path):
    assert ended(library, PROGRAM + INITIALIZES + CONTINUES, layout, tmp_path) == (0, "")


@worlds(("mpich", "0011"))
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(library, layout, tmp_path):
    status, output = ended(library, PROGRAM + INITIALIZES + RAISES + CONTINUES, layout, tmp_path)
    assert status != 0
    assert "ZeroDivisionError: on purpose" in output


@worlds(("mpich", "01"))
def test_the_job_has_the_exit_status_of_its_failed_rank(library, layout, tmp_path):
    status, output = ended(library, PROGRAM + INITIALIZES + EXITS, layout, tmp_path)
    assert status == 5, output


@worlds(("openmpi", "01"), ("mpich", "0011"))
def test_a_rank_interrupted_during_startup_ends_the_job(library, layout, tmp_path):
    status, output = ended(library, PROGRAM + IS_INTERRUPTED + INITIALIZES, layout, tmp_path)
    assert status != 0
    assert "KeyboardInterrupt" in output
