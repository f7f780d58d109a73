"""The process that forks the ranks of a launch, and the code that each rank runs.

It is a fresh interpreter that has imported ringcomm and no user code. It leads the process group of all ranks, and
kills them when the launching process requests it or has exited.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import open_store
from ringcomm.errors import RingcommError
from ringcomm.launcher import processes
from ringcomm.launcher.launch import importing_main
from ringcomm.launcher.pickling import LaunchSpec, RankResult, failed, pickled_failure, pickled_result
from ringcomm.machine.threads import start_thread, starting
from ringcomm.start import connect

__all__ = ["serve"]


def serve(control_number: int, *numbers: int) -> None:
    """Fork the ranks, and report the exit of each to the launching process."""
    control = Connection(control_number)
    senders = [Connection(number, readable=False) for number in numbers]
    preparation, data, place = control.recv()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the launching program ignores it, os.wait() would fail
    running: dict[int, int] = {}
    try:
        rank = _fork(len(senders), running)
        if rank is None:
            start_thread("kill on request", _kill_on_request, control, running)
    except RingcommError as error:
        control.send(error)
        _kill_on_request(control, running)  # this process, too
    if rank is not None:
        for end in (control, *senders):
            if end is not senders[rank]:
                end.close()
        senders[rank].send_bytes(_run_rank(preparation, data, replace(place, rank=rank)))
        return  # and let the interpreter exit normally
    for sender in senders:
        sender.close()
    while running:
        pid, status = os.wait()
        with suppress(OSError):  # the launching process has exited; this one follows
            control.send((running.pop(pid), os.waitstatus_to_exitcode(status), time.monotonic()))
    signal.pause()


def _fork(size: int, running: dict[int, int]) -> int | None:
    """Fork the ranks, and add the rank of each process to `running`. Return None here, in a rank its number."""
    for rank in range(size):
        with starting(f"rank {rank} of {size}"):
            pid = os.fork()
        if pid == 0:
            return rank
        running[pid] = rank
    return None


def _kill_on_request(control: Connection, running: Collection[int]) -> None:
    with suppress(EOFError, OSError):
        control.recv()
    processes.send_signal(signal.SIGKILL, os.getpgrp(), list(running))


def _run_rank(preparation: dict[str, Any], data: bytes, place: Place) -> bytes:
    """Run one rank and return its result, pickled."""
    np.random.seed()  # otherwise all forks draw the same numbers
    try:
        importing_main.set()
        spawn.prepare(preparation)
        importing_main.clear()
        spec: LaunchSpec = pickle.loads(data)
        with open_store(place, spec.config.start_limit) as store:
            comm = connect(place.rank, place.size, store, spec.config)
        with comm:
            value = spec.fn(comm, *spec.args, **spec.kwargs)
        return pickled_result(RankResult(place.rank, value, threads=_left_running()))
    except Exception as error:
        return pickled_failure(failed(place.rank, error))


def _left_running() -> list[str]:
    """Return the names of the threads for which this process will wait before it exits."""
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
