"""Ranks on several hosts that are late, leave, abort or are interrupted: all others raise with rank and reason."""

import signal
import time

import numpy as np
import pytest

import mpi_world
from failures import PROMPT, check_usable, raised, until_broken, until_waiting
from ringcomm import Aborted, CollectiveTimeout, PeerLost

pytestmark = pytest.mark.mpi

SHORT = 0.1  # seconds, the timeout of calls that never complete
LARGE = 300_001

WAITS = {
    "barrier": lambda comm, x, **how: comm.barrier(**how),
    "all_reduce": lambda comm, x, **how: comm.all_reduce(x, **how),
    "reduce": lambda comm, x, **how: comm.reduce(x, root=1, **how),
    "all_gather": lambda comm, x, **how: comm.all_gather(x, **how),
    "all_to_all": lambda comm, x, **how: comm.all_to_all(np.zeros((comm.size, 9)), **how),
    "a queue": lambda comm, x, **how: [w.wait() for w in [comm.all_reduce(x, async_op=True, **how) for _ in range(3)]],
    "objects": lambda comm, x, **how: comm.all_gather_object("me", **how),
}
HOSTS = [  # library, layout, the rank that fails, and the call of the others
    ("openmpi", "0123", 2, "all_reduce"),
    ("mpich", "0011", 3, "a queue"),
    ("openmpi", "0001", 3, "barrier"),
    ("mpich", "0101", 1, "all_to_all"),
]
MORE = [
    ("mpich", "01", 1, "reduce"),
    ("mpich", "0123", 0, "a queue"),
    ("openmpi", "0011", 0, "all_gather"),
    ("mpich", "0001", 1, "objects"),
    ("openmpi", "0112", 2, "all_reduce"),
]
hosts = pytest.mark.parametrize(
    ("library", "layout", "rank", "name"),
    [*HOSTS, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE)],
)


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
    assert (x == 7).all()
    assert_broken(CollectiveTimeout, str(error), group)
    check_usable(comm)
    return str(error)


@hosts
def test_a_late_rank_is_named_on_every_rank(library, layout, rank, name):
    texts = mpi_world.run(be_late, layout, rank, name, library=library)
    assert texts.pop(rank) in texts, "the late rank raises the error of the others"
    assert all(f"it was not called by rank {rank}" in text for text in texts)


def leave_out(comm, *late):
    group = comm.split(0)
    if comm.rank in late:
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: group.all_reduce(np.zeros(LARGE), timeout=SHORT))
    assert f"waited {SHORT:g} s in all_reduce(" in str(error)
    assert "it was not called by rank 1, 2" in str(error)
    assert error.rank == 1
    group.close()
    check_usable(comm)


def test_all_late_ranks_are_named():
    mpi_world.run(leave_out, "0011", 1, 2)


def wait_for_a_message(comm, peer):
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


@pytest.mark.parametrize("peer", [1, 3, None])
def test_a_message_that_is_never_sent_is_a_timeout(peer):
    mpi_world.run(wait_for_a_message, "0011", peer)


def wait_for_works(comm):
    group = comm.split(0)
    x = np.full(LARGE, 3.0)
    if comm.rank == 3:
        until_broken(group)
    else:
        receive = group.recv(np.zeros(1), 0, async_op=True)
        work = group.all_reduce(x, async_op=True)
        raised(CollectiveTimeout, lambda: work.wait(timeout=SHORT))
        assert work.done()
        for call in (lambda: work.result, receive.wait, work.wait):
            assert raised(CollectiveTimeout, call)
    assert_broken(CollectiveTimeout, str(until_broken(group)), group)
    assert (x == 3).all()
    check_usable(comm)


def test_an_expired_wait_breaks_the_communicator():
    mpi_world.run(wait_for_works, "0011")


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


@hosts
def test_abort_reaches_every_rank_with_its_reason(library, layout, rank, name):
    assert len({*mpi_world.run(abort, layout, rank, name, library=library)}) == 1


def close(comm, who, name):
    group = comm.split(0)
    x = np.full(LARGE, 7.0)
    if comm.rank == who:
        until_others_wait(group)
        group.close()
    else:
        error = raised(PeerLost, lambda: WAITS[name](group, x))
        assert f"rank {who} closed the communicator while rank " in str(error)
        assert error.rank == who
        assert (x == 7).all()
        assert_broken(PeerLost, str(error), group)
    check_usable(comm)


@hosts
def test_a_rank_that_closes_is_lost_to_the_ranks_that_need_it(library, layout, rank, name):
    mpi_world.run(close, layout, rank, name, library=library)


def leave_by_an_exception(comm):
    group = comm.split(0)
    if comm.rank == 1:
        with pytest.raises(ZeroDivisionError), group:
            raise ZeroDivisionError("on purpose")
    else:
        error = raised(Aborted, lambda: group.all_reduce(np.zeros(LARGE)))
        assert "ZeroDivisionError: on purpose" in str(error)
        assert error.rank == 1
    check_usable(comm)


@pytest.mark.parametrize("layout", ["0123", "0011", "0001"])
def test_an_exception_that_leaves_the_block_aborts_the_other_ranks(layout):
    mpi_world.run(leave_by_an_exception, layout)


# --- Signals ----------------------------------------------------------------------------------------------------------

INTERRUPTED = {
    "a receive": lambda comm, x: comm.recv(x, comm.size - 1),
    "a call that one rank does not make": lambda comm, x: comm.all_reduce(x, "max"),
    "calls in a row": lambda comm, x: [comm.all_reduce(x, "max") for _ in iter(int, 1)],
    "waiting for a work": lambda comm, x: comm.all_reduce(x, "max", async_op=True).wait(),
}


def interrupt(comm, name):
    """Rank 0 gets a KeyboardInterrupt inside a call; the last rank only makes calls in a row."""
    x = np.full(LARGE, comm.rank * 1.0)
    call = INTERRUPTED[name]
    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        comm.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            raised(KeyboardInterrupt, lambda: call(comm, x))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        comm.abort("interrupted between two calls")  # if it was in no call
        error = raised(Aborted, comm.barrier)
    else:
        comm.barrier()
        if comm.rank == comm.size - 1 and name != "calls in a row":
            until_broken(comm)
        error = raised(Aborted, lambda: call(comm, x))
    assert "interrupted" in str(error)
    assert error.rank == 0, str(error)
    frozen = x.copy()
    mpi_world.first(comm.size).Barrier()
    np.testing.assert_array_equal(x, frozen)  # no rank writes anymore
    return str(error)


@pytest.mark.parametrize("name", INTERRUPTED)
@pytest.mark.parametrize(("library", "layout"), mpi_world.worlds(("openmpi", "0123"), ("mpich", "0011")))
def test_an_interrupted_rank_is_named_on_all_others(library, layout, name):
    assert len({*mpi_world.run(interrupt, layout, name, library=library)}) == 1
