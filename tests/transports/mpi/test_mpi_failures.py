"""Ranks on several hosts that are late, leave, abort or are interrupted: all others raise with rank and reason."""

import signal

import numpy as np
import pytest

from cases.failures_between_hosts import (
    LARGE,
    SHORT,
    WAITS,
    abort,
    assert_broken,
    be_late,
    until_others_wait,
    wait_for_a_message,
    wait_for_works,
)
from harness import mpi_world
from harness.failures import check_usable, raised, until_broken
from ringcomm import Aborted, CollectiveTimeout, PeerLost

pytestmark = pytest.mark.mpi

HOSTS = [  # library, layout, the rank that fails, and the call of the others
    ("openmpi", "0123", 2, "all_reduce"),
    ("mpich", "0011", 3, "a queue"),
    ("openmpi", "0001", 3, "barrier"),
    ("mpich", "0101", 1, "all_to_all"),
]
hosts = pytest.mark.parametrize(("library", "layout", "rank", "name"), HOSTS)


@hosts
def test_a_late_rank_is_named_on_every_rank(library, layout, rank, name):
    texts = mpi_world.run(be_late, layout, rank, name, library=library)
    assert texts.pop(rank) in texts, "the late rank raises the error of the others"


@mpi_world.on("0011")
def test_all_late_ranks_are_named(comm):
    group = comm.split(0)
    if comm.rank in (1, 2):
        until_broken(group)
    error = raised(CollectiveTimeout, lambda: group.all_reduce(np.zeros(LARGE), timeout=SHORT))
    assert f"waited {SHORT:g} s in all_reduce(" in str(error)
    assert "it was not called by ranks 1 and 2" in str(error)
    assert error.rank == 1
    group.close()
    check_usable(comm)


@pytest.mark.parametrize("peer", [1, 3, None])
def test_a_message_that_is_never_sent_is_a_timeout(peer):
    mpi_world.run(wait_for_a_message, "0011", peer)


def test_an_expired_wait_breaks_the_communicator():
    mpi_world.run(wait_for_works, "0011")


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
        assert f"rank {who} closed the communicator while rank " in str(error), str(error)
        assert error.rank == who
        assert (x == 7).all()
        assert_broken(PeerLost, str(error), group)
    check_usable(comm)


@hosts
def test_a_rank_that_closes_is_lost_to_the_ranks_that_need_it(library, layout, rank, name):
    mpi_world.run(close, layout, rank, name, library=library)


@mpi_world.on("0123", "0011", "0001")
def test_an_exception_that_leaves_the_block_aborts_the_other_ranks(comm):
    group = comm.split(0)
    if comm.rank == 1:
        with pytest.raises(ZeroDivisionError), group:
            raise ZeroDivisionError("on purpose")
    else:
        error = raised(Aborted, lambda: group.all_reduce(np.zeros(LARGE)))
        assert "ZeroDivisionError: on purpose" in str(error)
        assert error.rank == 1
    check_usable(comm)


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
