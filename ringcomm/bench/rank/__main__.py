"""The program of a rank: connect to the bench and answer its requests until it disconnects."""

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Client
from pathlib import Path

from .library import Library
from .measure import RankBench

PR_SET_PDEATHSIG = 1


def main(module: str, rank_variable: str, folder: str, device: str, binding: str, request: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with its launcher
    if binding == "bound":
        bind(int(os.environ[rank_variable]))  # before the library starts threads
    rank: Library = import_module(f".{module}", __package__).start(folder, device)
    bench = RankBench(rank, folder)
    outcome = bench.answer(json.loads(request))  # before this rank first sleeps
    fd = os.open(folder, os.O_PATH)  # its path may be too long for a socket
    client = Client(f"/proc/self/fd/{fd}/socket", "AF_UNIX")
    os.close(fd)
    with client as connection:
        # JSON: a pickle could refer to modules that only one of the two environments has.
        hello = {"rank": rank.rank, "pid": os.getpid(), "versions": rank.versions, "outcome": outcome}
        connection.send_bytes(json.dumps(hello).encode())
        while True:
            try:
                received = json.loads(connection.recv_bytes())
            except EOFError:
                break
            connection.send_bytes(json.dumps(bench.answer(received)).encode())
            if received == ["close"]:
                return
    os._exit(1)  # the bench has ended; finalizing could wait for ranks that have ended too


def bind(rank: int) -> None:
    """Bind to a core; ranks beyond the number of cores start over. Unbound ranks would make every run different."""
    try:
        cores = sorted(os.sched_getaffinity(0), key=lambda core: (siblings(core).index(core), core))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    except PermissionError as error:  # of a sandbox
        if rank == 0:
            print(f"the ranks are not bound to cores, so runs differ: {error}", file=sys.stderr)


def siblings(core: int) -> list[int]:
    """Return the logical cores of a physical core. Ranks take the first of each before the second of any."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        ranges = [[int(number) for number in part.split("-")] for part in text.strip().split(",")]
        found = [number for part in ranges for number in range(part[0], part[-1] + 1)]
    except (OSError, ValueError):
        found = []
    return found if core in found else [core]


if __name__ == "__main__":
    main(*sys.argv[1:])
