"""What the tests of failures share: calls that must fail, what holds afterwards, and ranks that may be killed."""

import re
import time
from contextlib import contextmanager
from multiprocessing.connection import wait

import numpy as np

import harness
from ringcomm import RingcommError

PROMPT = 5.0  # seconds: what should take at most one, on a machine that is busy


def raised(kind, call):
    """Return the error of this kind that `call()` raises, without the frames, which hold communicators."""
    try:
        call()
    except kind as error:
        return error.with_traceback(None)
    raise AssertionError(f"{kind.__name__} was not raised")


def lines_of(report):
    """Return the line of each rank of a report, or of a timeout; without its name."""
    lines = re.findall(r"^rank (\d+): (.*)$", report, re.MULTILINE)
    return {int(rank): line for rank, line in lines}


def until(condition, what):
    """Return what `condition()` is once that is something."""
    deadline = time.monotonic() + harness.OPERATION
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not seen: {what}"
        time.sleep(0.001)
    return value


def until_waiting(comm, rank):
    """Return once `rank` has been in a call for so long that it sleeps."""

    def waits():
        running = re.findall(r"running for (\S+) s", lines_of(comm._transport.report(5))[rank])
        return any(float(seconds) >= 0.02 for seconds in running)

    until(waits, f"rank {rank} in a call")


def until_broken(comm):
    """Return the error that breaks the communicator."""

    def broken():
        try:
            comm.check()
        except RingcommError as error:
            return error
        return None

    return until(broken, "a failure")


def check_usable(comm):
    """Compute in both slots of a start record, in one chunk and in several, and send to a neighbour."""
    total = comm.size * (comm.size + 1) / 2
    for length in (1, 2, 300_001, 5):
        x = np.full(length, comm.rank + 1, np.float32)
        comm.all_reduce(x)
        assert (x == total).all(), f"the sum of {length} is {x}, not {total}"
    out = np.empty(1)
    comm.sendrecv(np.array([comm.rank + 1.0]), (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
    assert out[0] == (comm.rank - 1) % comm.size + 1


@contextmanager
def mortals(size, settings=()):
    """Yield the pool of a world that may be broken: nobody uses it afterwards."""
    pool = harness.Pool(size, settings)
    try:
        yield pool
    finally:
        pool.kill()


def outcomes(pool, fn, *args):
    """Call `fn(comm, *args)` on every rank; yield (rank, result or error, when) in the order in which they end.

    A rank that dies ends with a ConnectionError.
    """
    for connection in pool.connections:
        connection.send((fn, args))
    running = {connection: rank for rank, connection in enumerate(pool.connections)}
    deadline = time.monotonic() + harness.JOB
    while running:
        ready = wait(running, deadline - time.monotonic())
        assert ready, f"no answer from ranks {sorted(running.values())}"
        for connection in ready:
            rank = running.pop(connection)
            result, failure = harness.receive(connection, rank)
            yield rank, failure or result, time.monotonic()
