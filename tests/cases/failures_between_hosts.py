"""Calls of ranks on several hosts that fail, over any link: each rank raises the same reason, and the world goes on."""

import time

import numpy as np

from harness.failures import PROMPT, check_usable, raised, until_broken, until_waiting
from ringcomm import Aborted, CollectiveTimeout

SHORT = 0.2  # seconds, the timeout of calls that never complete
LARGE = 300_001

WAITS = {
    "barrier": lambda comm, x, **how: comm.barrier(**how),
    "all_reduce": lambda comm, x, **how: comm.all_reduce(x, **how),
    "small": lambda comm, x, **how: comm.all_reduce(x[:3], **how),
    "reduce": lambda comm, x, **how: comm.reduce(x, root=1, **how),
    "all_gather": lambda comm, x, **how: comm.all_gather(x, **how),
    "all_to_all": lambda comm, x, **how: comm.all_to_all(np.zeros((comm.size, 9)), **how),
    "a queue": lambda comm, x, **how: [w.wait() for w in [comm.all_reduce(x, async_op=True, **how) for _ in range(3)]],
    "objects": lambda comm, x, **how: comm.all_gather_object("me", **how),
}


def assert_broken(kind, text, group):
    """Check that every call raises the first reason at once; then close the group."""
    begin = time.monotonic()
    for call in (group.barrier, group.check, lambda: group.recv(np.zeros(1)), lambda: group.split(0)):
        assert str(raised(kind, call)) == text
    assert time.monotonic() - begin < PROMPT
    group.close()


def be_late(comm, late, name):
    group = comm.split(0)
    x = np.full(LARGE, 7.0)
    if comm.rank == late:
        until_broken(group)
    begin = time.monotonic()
    error = raised(CollectiveTimeout, lambda: WAITS[name](group, x, timeout=SHORT))
    assert time.monotonic() - begin < SHORT + 2
    assert error.rank == late
    assert f"it was not called by rank {late}" in str(error)
    assert (x == 7).all()
    assert_broken(CollectiveTimeout, str(error), group)
    check_usable(comm)
    return str(error)


def wait_for_a_message(comm, peer):
    """Rank 0 waits for a message from `peer`, or from any rank, which nobody sends."""
    group = comm.split(0)
    x = np.full(3, 7.0)
    if comm.rank == 0:
        begin = time.monotonic()
        error = raised(CollectiveTimeout, lambda: group.recv(x, peer, tag=5, timeout=SHORT))
        assert time.monotonic() - begin < SHORT + 2
        words = f"recv(float64 x 3, from {'any' if peer is None else peer}) with tag 5"
        assert f"waited {SHORT:g} s for {words}" in str(error), str(error)
        assert (x == 7).all()
    else:
        error = until_broken(group)
    assert error.rank == (peer or 0)
    assert_broken(CollectiveTimeout, str(error), group)
    check_usable(comm)


def wait_for_works(comm):
    """The last rank joins neither the collective nor the message that the others wait for."""
    group = comm.split(0)
    x = np.full(LARGE, 3.0)
    if comm.rank == comm.size - 1:
        until_broken(group)
    else:
        receive = group.recv(np.zeros(1), comm.size - 1, async_op=True)
        work = group.all_reduce(x, async_op=True)
        raised(CollectiveTimeout, lambda: work.wait(timeout=SHORT))
        assert work.done()
        for call in (lambda: work.result, receive.wait, work.wait):
            assert raised(CollectiveTimeout, call)
    assert_broken(CollectiveTimeout, str(until_broken(group)), group)
    assert (x == 3).all()
    check_usable(comm)


def until_others_wait(group):
    for rank in range(group.size):
        if rank != group.rank:
            until_waiting(group, rank)


def abort(comm, who, name):
    group = comm.split(0)
    x = np.full(LARGE, 7.0)
    if comm.rank == who:
        until_others_wait(group)
        group.abort("the data is wrong")
        error = until_broken(group)
    else:
        error = raised(Aborted, lambda: WAITS[name](group, x))
    assert "the data is wrong" in str(error)
    assert error.rank == who
    assert (x == 7).all()
    assert_broken(Aborted, str(error), group)
    check_usable(comm)
    return str(error)
