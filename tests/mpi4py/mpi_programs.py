"""Programs of mpi4py, run on ringcomm and on Open MPI, and what they print."""

import re
import subprocess
import sys
from pathlib import Path

import harness
import ringcomm.mpi4py
from harness import mpi_world, pools
from ringcomm.launcher.run import MPI4PY

ringcomm.mpi4py.rc.finalize = False  # when the ranks of `on` end
from ringcomm.mpi4py import MPI  # noqa: E402 (it starts the world)

FOLDER = Path(__file__).parent
RINGCOMM = [sys.executable, "-m", "ringcomm", "run", "--mpi4py", "-n"]
DEADLINE = 2 * harness.OPERATION  # for a program: it starts as many processes as there are ranks

# The programs of sections, in an order in which one job can run them (the last one finalizes MPI), and the others.
SECTIONS = (
    "communicators",
    "groups",
    "topologies",
    "collectives",
    "reductions",
    "objects",
    "messages",
    "object_messages",
    "started_requests",
    "buffers",
    "arguments",
    "datatypes",
    "errors",
    "util",
    "pool_of_ranks",
    "environment",
)
PROGRAMS = (*SECTIONS, "pool")


def on_ringcomm(size, *arguments):
    """Return what a program prints on ringcomm, without the ranks before the lines."""
    done = run_on_ringcomm(size, *arguments)
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[\d+\] ?", "", done.stdout, flags=re.MULTILINE)


def on_open_mpi(size, *arguments):
    """Return what a program prints on Open MPI; skip the test where there is none."""
    done = run_on_open_mpi(size, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_ringcomm(size, *arguments):
    return subprocess.run([*RINGCOMM, str(size), *arguments], capture_output=True, text=True, timeout=DEADLINE)


def on(size):
    """Make a test of a function that each of `size` ranks calls with COMM_WORLD.

    They serve many tests, and the function leaves them usable.
    """

    def start(test, _, args):
        harness.run(call, size, test, *args, settings=(("PYTHONPATH", str(MPI4PY)),))

    return lambda fn: pools.made_test(fn, [], start)


def call(_, test, *args):
    handler = MPI.COMM_WORLD.Get_errhandler()
    test.on_rank(MPI.COMM_WORLD, *args)
    MPI.COMM_WORLD.Set_errhandler(handler)


def run_on_open_mpi(size, *arguments, **variables):
    mpi_world.skip_without("openmpi")
    with mpi_world.start("openmpi", size, **variables)(subprocess.PIPE, *arguments) as process:
        try:
            printed = process.communicate(timeout=DEADLINE)
        except BaseException:
            process.terminate()  # mpirun then ends the ranks
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, *(each.decode() for each in printed))


def arguments_of(name):
    """Return the command line of a program in programs/."""
    return [*(["-m", "mpi4py.futures"] if name == "pool" else []), str(FOLDER / "programs" / f"{name}.py")]


def print_together(run, size):
    """Return what all programs print, in two jobs, with `run` on_ringcomm or on_open_mpi."""
    paths = [path for name in SECTIONS for path in arguments_of(name)]
    return run(size, *arguments_of("together"), *paths) + run(size, *arguments_of("pool"))
