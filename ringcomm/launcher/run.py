"""`ringcomm run`: run a program on several ranks of this machine, forward its output, and end all ranks together.

On several machines one of these runs on each; nodes.py connects them.
"""

import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host
from ringcomm.errors import ArgumentError, refuse
from ringcomm.launcher import processes
from ringcomm.launcher.nodes import NodeOptions, join_nodes
from ringcomm.launcher.ranks import RankStart
from ringcomm.launcher.signals import SignalSocket
from ringcomm.launcher.supervisor import FORWARDED, Supervisor
from ringcomm.machine import descriptors, topology

__all__ = ["run"]

log = logging.getLogger("ringcomm")

MPI4PY = Path(__file__).parents[1] / "mpi4py" / "shim"  # has a package mpi4py


def run(
    command: Sequence[str],
    size: int,
    options: NodeOptions | None = None,
    bind: bool | None = None,
    threads: int | None = None,
    mpi4py: bool = False,
    max_restarts: int | None = None,
    modules: Sequence[str] = (),
) -> int:
    """Run `command` on `size` ranks: a Python file, `-m` and a module, or an executable, each with its arguments.

    With `options` they are the ranks of this node; other launchers start the others on theirs. Each rank
    is bound to cores of its own if there are enough; with `bind` there have to be, and with False no rank is bound.
    `threads` is OMP_NUM_THREADS of each, and how many cores it then has; by default ranks that outnumber the cores
    compute on one thread each, and the others on as many as they have cores, unless the environment says otherwise.
    With `mpi4py`, `import mpi4py` gives ringcomm.mpi4py in the ranks and in the processes that they start.
    With `max_restarts`, a rank that fails, or that the others leave out, is restarted, so many times at most, and the
    others continue: they shrink and grow their communicator.
    With `modules`, one process imports them, and the ranks are forked from it.

    Returns the exit status of the rank that failed first (128 + the signal if it was killed), else 0; 1 if a node was
    lost. With `max_restarts` it is 0 if any rank has ended well. A status of 1 counts as later by CAUSE_TIMEOUT.
    Forwards SIGINT and SIGTERM to the ranks. Must be called on the main thread.
    """
    if not 1 <= size <= processes.MAX_RANKS:
        raise refuse("number of ranks", f"1 to {processes.MAX_RANKS}", size)
    shares = _shares(size, bind, threads)
    outnumbered = topology.outnumbered(shares)
    with ExitStack() as stack:
        nodes = stack.enter_context(join_nodes(options, size)) if options else None
        command = _program(command, modules)
        descriptors.provide_for_launcher(size)
        alone = Place(0, size, secrets.token_hex(16), secrets.token_hex(16))
        first = nodes.first if nodes else stack.enter_context(serve_one_host(alone))
        first = replace(first, max_restarts=max_restarts, first=first.rank)
        if modules and nodes:
            modules = [*modules, "ringcomm.transports.network"]  # which `init` would import on each rank
        with SignalSocket(signal.SIGCHLD, *FORWARDED) as signals, Supervisor(signals, nodes, first) as supervisor:
            starts = []
            for local_rank, cores in enumerate(shares):
                place = replace(first, rank=first.rank + local_rank)
                # Without PYTHONUNBUFFERED, output to a pipe is late, and lost if the rank is killed.
                environment = {"PYTHONUNBUFFERED": "1", **place.environment()}
                if threads:
                    environment["OMP_NUM_THREADS"] = str(threads)
                elif outnumbered:
                    environment.setdefault("OMP_NUM_THREADS", "1")
                if mpi4py:
                    _put_first(MPI4PY, environment)
                starts.append(RankStart(place.rank, command, environment, cores, modules))
            if not modules or supervisor.import_modules(starts[0]):
                for start in starts:
                    supervisor.start(start)
            return supervisor.wait()


def _shares(size: int, bind: bool | None, threads: int | None) -> list[set[int]]:
    """Return the cores of each rank."""
    cores = topology.cores()
    enough = not topology.outnumbered([cores] * size)
    if bind and (not enough or topology.outnumbered([cores] * size * (threads or 1))):
        what, got = ("ranks", f"{size} ranks") if threads is None else ("threads", f"{size} ranks of {threads} threads")
        raise refuse("--bind core", f"at most as many {what} as cores ({topology.describe()})", got)
    if bind is False or not enough:
        log.info("%d ranks are not bound to cores (%s)", size, topology.describe())
        return [cores] * size
    denied = topology.binding_denied()
    if bind and denied:
        raise refuse("--bind core", "a system that lets ranks be bound", denied)
    if denied:  # they run all the same
        log.warning("%d ranks are not bound to cores: the system denies it (%s)", size, denied)
        return [cores] * size
    return topology.shares(cores, size, threads)


def _put_first(folder: Path, environment: dict[str, str]) -> None:
    """Make Python look for modules in this folder before all others of PYTHONPATH and of its installation."""
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))


def _program(command: Sequence[str], modules: Sequence[str]) -> list[str]:
    first = command[0]
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *command]
    if modules:
        raise refuse("--preload", "a Python program: a file that ends with .py, or -m and a module", repr(first))
    if shutil.which(first) is None:
        raise ArgumentError(f"{first!r} is not an executable; a Python program ends with .py, or is a module after -m")
    return list(command)
