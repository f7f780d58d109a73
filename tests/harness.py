"""How tests run code on ranks, and what tests must not leave behind.

`run(fn, size, *args)` calls `fn(comm, *args)` on every rank and returns the results in rank order. Deadlines lie inside
each other: an operation (OPERATION), a job (JOB), the test (`timeout` in pyproject.toml), the dump of all stacks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import threading
import time
import traceback
import uuid
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import ringcomm
from ringcomm.bench.job import shared_files

OPERATION = 20.0  # seconds
JOB = 40.0
WORLDS = ("threads", "processes")

MARK = "PYTEST_OF_RINGCOMM"  # with the id of this process, in the environment of every process that the tests start


def run(fn, size, *args, world="processes", settings=()):
    """Run `fn` on ranks that are threads, or on warm processes, for which it must be a function of a module.

    The processes and their communicator serve many tests: `fn` leaves it usable, or raises. `settings` are pairs of a
    RINGCOMM_* variable and its value; threads take those of this process.
    """
    if world == "threads":
        return ringcomm.launch(fn, size, world="threads", args=args, timeout=OPERATION)
    return run_in_pool((size, *settings), lambda: Pool(size, settings), fn, args)


def run_in_pool(key, make, fn, args):
    """Run `fn` in the pool of this key, created on first use and ended if `fn` fails."""
    pool = pools.get(key) or pools.setdefault(key, make())
    try:
        return pool.run(fn, args)
    except BaseException:
        pools.pop(key).kill()
        raise


def start_process(fn, *args, name=None):
    """Start a process that calls `fn(connection, *args)`; return it, and the other end of the connection.

    It is forked from one that has imported preload.py, so that it starts at once.
    """
    context = multiprocessing.get_context("forkserver")
    with contextlib.chdir(Path(__file__).parent):  # where preload.py is found
        forkserver.ensure_running()
    ours, theirs = context.Pipe()
    process = context.Process(target=fn, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Pool:
    """Connected processes that wait for work. `hosts` has a character per rank, its host; empty: all are on one."""

    def __init__(self, size, settings=(), hosts=""):
        job = {"RINGCOMM_SIZE": str(size), "RINGCOMM_JOB": uuid.uuid4().hex, "RINGCOMM_NONCE": uuid.uuid4().hex}
        self.workers, self.connections = [], []
        for rank in range(size):
            place = {**job, **dict(settings), "RINGCOMM_RANK": str(rank), "RINGCOMM_HOST_ID": hosts[rank : rank + 1]}
            worker, connection = start_process(serve, place, name=f"rank {rank} of {size}")
            self.workers.append(worker)
            self.connections.append(connection)

    def run(self, fn, args, limit=None):
        for connection in self.connections:
            connection.send((fn, args))
        results = [None] * len(self.connections)
        failures = []
        waiting = dict(zip(self.connections, range(len(results)), strict=True))
        deadline = time.monotonic() + (limit or JOB)
        while waiting:
            ready = wait(waiting, deadline - time.monotonic())
            if not ready:
                failures.append(TimeoutError(f"{fn.__name__}: no answer from ranks {sorted(waiting.values())}"))
                break
            for connection in ready:
                rank = waiting.pop(connection)
                results[rank], failure = receive(connection, rank)
                if failure:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + 1.0)  # the other ranks may hang
        if failures:
            raise min(
                failures, key=lambda failure: isinstance(failure, ringcomm.Aborted)
            )  # the cause, not its consequences
        return results

    def close(self):
        for connection in self.connections:
            connection.close()
        for worker in self.workers:
            worker.join(OPERATION)
        self.kill()

    def kill(self):
        for connection, worker in zip(self.connections, self.workers, strict=True):
            connection.close()
            worker.kill()
            worker.join()
            worker.close()


pools: dict[tuple, Pool] = {}


def receive(connection: Connection, rank):
    try:
        result, failure, text = connection.recv()
    except EOFError:
        return None, ConnectionError(f"rank {rank} is gone")
    if failure:
        failure.add_note(f"on rank {rank}:\n{text}")
    return result, failure


def serve(connection: Connection, place):
    """Run one rank of a pool until the other end closes."""
    os.environ.update(place)
    with ringcomm.init(timeout=OPERATION) as comm:
        answer(connection, comm)


def answer(connection: Connection, comm):
    """Call `fn(comm, *args)` for each (fn, args) received, until the other end closes."""
    while True:
        try:
            fn, args = connection.recv()
            answer = fn(comm, *args), None, ""
        except EOFError:
            return
        except BaseException as failure:
            answer = None, sendable(failure), traceback.format_exc()
        connection.send(answer)


def sendable(failure):
    try:
        assert type(failure).__module__ != "mpi4py.MPI"  # which the tests do not import
        return pickle.loads(pickle.dumps(failure))
    except Exception:
        return RuntimeError(repr(failure))


def footprint():
    """Count the processes, threads, descriptors and files of this process and its children."""
    return Counter([*processes(), *threads(), *descriptors(), *files()])


def left_behind(before, seconds=5):
    """Return the resources that were not there before and are not released in time."""
    deadline = time.monotonic() + seconds
    while left := footprint() - before:
        if time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.05)  # killed processes take a moment; tests that run at the same time share files
    return []


def end_pools():
    while pools:
        pools.popitem()[1].close()


def stop_helpers():
    """End the pools, and the two processes that multiprocessing keeps for the next time."""
    end_pools()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def processes():
    mark = f"{MARK}={os.getpid()}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (path / "environ").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if marked or parent == os.getpid():
            yield f"process {path.name}: {command}"


def threads():
    yield from (f"thread {thread.name}" for thread in threading.enumerate())
    for path in Path("/proc/self/task").glob("*/comm"):
        if (name := path.read_text().strip()).startswith("ringcomm"):
            yield f"native thread {name}"


def descriptors():
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:
            continue  # the one that lists this folder
        if "/matplotlib/" not in target:  # it keeps its fonts open
            yield "descriptor " + re.sub(r"\d+", "N", target)


def files():
    """Yield files that no process has mapped: other tests may run at the same time."""
    mapped = {path for process in Path("/proc").glob("[0-9]*") for path in shared_files(int(process.name))}
    yield from (f"file {path}" for path in Path("/dev/shm").iterdir() if str(path) not in mapped)
