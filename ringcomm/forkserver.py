"""The process that forks the ranks of a launch, and what each of them does.

It is a bare interpreter that has imported ringcomm and nothing of the user's. It leads the process group of all ranks,
and kills them when the launching process tells it to, or has ended.
"""

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ringcomm import processes
from ringcomm.errors import RingcommError
from ringcomm.launch import Outcome, Task, failed, importing_main
from ringcomm.place import Place
from ringcomm.start import connect
from ringcomm.store import open_store

__all__ = ["serve"]


def serve(control_number: int, *numbers: int) -> None:
    """Fork the ranks, and tell the launching process how each ends."""
    control = Connection(control_number)
    senders = [Connection(number, readable=False) for number in numbers]
    preparation, data, place = control.recv()
    running = {}
    for rank, sender in enumerate(senders):
        pid = os.fork()
        if pid == 0:
            for end in (control, *senders):
                if end is not sender:
                    end.close()
            sender.send_bytes(_rank(preparation, data, replace(place, rank=rank)))
            return  # and the interpreter ends as it always does
        running[pid] = rank
    for sender in senders:
        sender.close()
    threading.Thread(target=_end_when_told, args=(control, running), daemon=True).start()
    while running:
        pid, status = os.wait()
        with suppress(OSError):  # the launching process has ended, and so will this one
            control.send((running.pop(pid), os.waitstatus_to_exitcode(status), time.monotonic()))
    signal.pause()


def _end_when_told(control: Connection, running: Collection[int]) -> None:
    with suppress(EOFError, OSError):
        control.recv()
    processes.send(signal.SIGKILL, os.getpgrp(), list(running))


def _rank(preparation: dict[str, Any], data: bytes, place: Place) -> bytes:
    """Run one rank and return its outcome, pickled."""
    np.random.seed()  # a fork would draw the numbers that the others draw
    try:
        importing_main.set()
        spawn.prepare(preparation)
        importing_main.clear()
        task: Task = pickle.loads(data)
        with open_store(place, task.config.timeout) as store:
            comm = connect(place.rank, place.size, store, task.config)
        with comm:
            outcome = Outcome(place.rank, task.fn(comm, *task.args, **task.kwargs))
        return pickle.dumps(outcome)
    except Exception as error:
        outcome = failed(place.rank, error)
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)  # not every exception comes back
        return packed
    except Exception:
        summary = traceback.format_exception_only(outcome.error)[-1].strip()
        return pickle.dumps(outcome._replace(error=RingcommError(summary)))
