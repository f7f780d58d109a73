"""Pools: ranks that wait for work. Those of `run` serve many tests, until a job fails in them."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import time
import traceback
import uuid
from functools import wraps
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

import ringcomm

OPERATION = 20.0  # seconds
JOB = 40.0
WORLDS = ("threads", "processes")


def run(fn, size, *args, world="processes", settings=()):
    """Run `fn` on ranks that are threads, or on warm processes, for which it must be a function of a module.

    The processes and their communicator serve many tests: `fn` leaves it usable, or raises. `settings` are pairs of a
    RINGCOMM_* variable and its value; threads take those of this process.
    """
    if world == "threads":
        return ringcomm.launch(fn, size, world="threads", args=args, timeout=OPERATION)
    return run_in_pool((size, *settings), lambda: Pool(size, settings), fn, args)


def on(*sizes, world=None, settings=(), fresh=False):
    """Make a test of a function that each rank calls, in worlds of these sizes: of both kinds (the fixture), or of one.

    What the function takes besides its communicator are parameters and fixtures of the test. `settings` are for
    processes. `fresh` processes serve this test alone, which may break their communicator.
    """
    world = "processes" if settings else world
    names = ["size"] * (len(sizes) > 1) + ["world"] * (world is None)

    def start(test, place, args):
        size, where = place.get("size", sizes[0]), place.get("world", world)
        if fresh and where == "processes":
            pool = Pool(size, settings)
            try:
                pool.run(call, (test, *args))
            finally:
                pool.kill()
        else:
            run(call, size, test, *args, world=where, settings=settings)

    def test_of(fn):
        test = made_test(fn, names, start)
        return pytest.mark.parametrize("size", sizes)(test) if "size" in names else test

    return test_of


def made_test(fn, names, start, first=1):
    """Make a test of a function of the ranks, by `start(test, {name: value}, args)`.

    The test takes `names`, which say where the ranks are, and the parameters of `fn` without the `first` ones.
    """
    own = [*inspect.signature(fn).parameters.values()][first:]

    @wraps(fn)
    def test(**given):
        start(test, {name: given[name] for name in names}, [given[each.name] for each in own])

    more = [name for name in names if name not in {each.name for each in own}]
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in more]
    test.__signature__ = inspect.Signature([*places, *own])
    test.on_rank = fn
    return test


def call(comm, test, *args):
    """Call on a rank the function that `on` has made a test of."""
    return test.on_rank(comm, *args)


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

    It is forked from one that has imported harness.preload, so that it starts at once.
    """
    context = multiprocessing.get_context("forkserver")
    with contextlib.chdir(Path(__file__).parents[1]):  # where the harness is found
        forkserver.ensure_running()
    ours, theirs = context.Pipe()
    process = context.Process(target=fn, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Pool:
    """Connected processes that wait for work. `hosts` has a character per rank, its host; empty: all are on one."""

    def __init__(self, size, settings=(), hosts=""):
        job = {"RINGCOMM_SIZE": str(size), "RINGCOMM_JOB": uuid.uuid4().hex, "RINGCOMM_JOB_SECRET": uuid.uuid4().hex}
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
    fast_path = getattr(comm, "fast_path", None)  # MPI's communicators have none
    while True:
        try:
            fn, args = connection.recv()
            answer = fn(comm, *args), None, ""
            assert getattr(comm, "fast_path", None) is fast_path, "the next test would take the general path"
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


def end_pools():
    while pools:
        pools.popitem()[1].close()


def stop_helpers():
    """End the pools, and the two processes that multiprocessing keeps for the next time."""
    end_pools()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
