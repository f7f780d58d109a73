"""Shared by the tests of failures: calls that must fail, and checks that a communicator still works."""

import re
import time
from multiprocessing.connection import wait

import numpy as np

from harness import pools, worlds
from ringcomm import MismatchError, RingcommError

PROMPT = 5.0  # seconds; the bound is 1 s on an idle machine


def raised(kind, call):
    """Return the error of this kind that `call()` raises, without its frames, which reference communicators."""
    try:
        call()
    except kind as error:
        return error.with_traceback(None)
    raise AssertionError(f"{kind.__name__} was not raised")


def mismatch_of(comm, call):
    """Return the mismatch of a call, which may have returned before it could see it: then the next one raises it."""
    try:
        call()
    except MismatchError as error:
        comm.barrier()
        return error.with_traceback(None)
    return raised(MismatchError, comm.barrier)


def lines_of(report):
    """Return the line of each rank in a report or timeout message, without the rank."""
    lines = re.findall(r"^rank (\d+): (.*)$", report, re.MULTILINE)
    return {int(rank): line for rank, line in lines}


def until(condition, what):
    """Return `condition()` as soon as it is true."""
    deadline = time.monotonic() + pools.OPERATION
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.001)
    return value


def until_waiting(comm, rank):
    """Return when `rank` has been in a call long enough to sleep."""

    def waits():
        running = re.findall(r"running for (\S+) s", lines_of(comm._transport.report(5))[rank])
        return any(float(seconds) >= 0.02 for seconds in running)

    until(waits, f"rank {rank} in a call")


def until_waiting_longest(comm, awaited):
    """Return when each rank in `awaited` has waited for the rank there, longer than for all others before in its call.

    However slowly these were woken: the time until it was first seen to wait for that rank is the most they took.
    """
    seen = {}

    def longest():
        lines = lines_of(comm._transport.report(1))
        for rank, other in awaited.items():
            found = re.search(rf"running for (\S+) s, waits for rank {other}\b", lines[rank])
            if not found or float(found[1]) <= 2 * seen.setdefault(rank, float(found[1])):
                return False
        return True

    until(longest, f"waits of ranks {[*awaited]}")


def until_broken(comm):
    """Return the error that breaks the communicator."""

    def broken():
        try:
            comm.check()
        except RingcommError as error:
            return error
        return None

    return until(broken, "a failure")


def until_others_have_left(comm, rank):
    """Return on `rank` once the others have left their calls before: what it does next would end those, too."""
    if comm.rank != rank:
        comm.send(np.empty(0), rank)
        return
    for other in range(comm.size):
        if other != rank:
            comm.recv(np.empty(0), other)


def check_usable(comm):
    """Use both slots of a start record, one and several chunks, and point-to-point messages."""
    total = comm.size * (comm.size + 1) / 2
    for length in (1, 2, 300_001, 5):
        x = np.full(length, comm.rank + 1, np.float32)
        comm.all_reduce(x)
        assert (x == total).all(), f"the sum of {length} is {x}, not {total}"
    out = np.empty(1)
    comm.sendrecv(np.array([comm.rank + 1.0]), (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
    assert out[0] == (comm.rank - 1) % comm.size + 1


def survivors_of(fn, ranks, *args, launcher="fork", settings=()):
    """Run `fn` on ranks some of which die; return the results of the others by rank, and when the last came."""
    with worlds.world(ranks, launcher, settings) as pool:
        start = time.monotonic()
        found = [*outcomes(pool, fn, *args)]
    answers = {rank: answer for rank, answer, _ in found if not isinstance(answer, ConnectionError)}
    for rank, answer in answers.items():
        assert not isinstance(answer, BaseException), f"rank {rank}: {answer!r}"
    return answers, max(when for _, _, when in found) - start


def outcomes(pool, fn, *args):
    """Call `fn(comm, *args)` on every rank; yield (rank, result or error, when) in the order of completion.

    The error of a rank that dies is a ConnectionError.
    """
    pool.start(fn, args)
    running = {connection: rank for rank, connection in enumerate(pool.connections)}
    deadline = time.monotonic() + pools.JOB
    while running:
        ready = wait(running, deadline - time.monotonic())
        assert ready, f"no answer from ranks {sorted(running.values())}"
        for connection in ready:
            rank = running.pop(connection)
            ended = pool.receive(rank)
            yield rank, ended.error or ended.value, time.monotonic()
