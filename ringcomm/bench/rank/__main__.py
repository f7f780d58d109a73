"""The program of a rank: connect to the bench, then answer its requests until it goes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

from .library import Library
from .measure import Bench

PR_SET_PDEATHSIG = 1
MODULES = {"ringcomm": "ours", "openmpi": "mpi", "mpich": "mpi", "gloo": "gloo"}


def main(library: str, socket: str, rank_variable: str, folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of the launcher: nobody is left behind
    bind(int(os.environ[rank_variable]))  # before the library starts threads of its own
    rank: Library = import_module(f".{MODULES[library]}", __package__).start(folder)
    bench = Bench(rank)
    with Client(socket, "AF_UNIX") as connection:
        # In JSON: a pickle could name what only one of the two environments has.
        hello = {"rank": rank.rank, "pid": os.getpid(), "versions": rank.versions}
        connection.send_bytes(json.dumps(hello).encode())
        while True:
            try:
                name, *arguments = json.loads(connection.recv_bytes())
            except EOFError:
                break
            try:
                answer: tuple[str, Any] = ("done", getattr(bench, name)(*arguments))
            except Exception as error:  # whatever the library raises is told
                traceback.print_exc()
                answer = ("failed", f"{type(error).__name__}: {error}".splitlines()[0])
            connection.send_bytes(json.dumps(answer).encode())
            if name == "close":
                return
    os._exit(1)  # the bench is gone, and the other ranks need not be here to say goodbye to


def bind(rank: int) -> None:
    """Bind to a core, in turn if there are fewer than ranks: where they wander, every run is another."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


if __name__ == "__main__":
    main(*sys.argv[1:])
