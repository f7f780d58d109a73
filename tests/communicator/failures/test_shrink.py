"""shrink: those that are left of a broken communicator go on together."""

import logging
import os
import signal
import threading
import time
import uuid
from contextlib import suppress

import numpy as np
import pytest
from test_symmetric import shared_bytes

import harness
from harness.failures import PROMPT, check_usable, raised, survivors_of, until_waiting
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, RingcommError
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host
from ringcomm.transports.shm import ShmTransport


@pytest.fixture
def launched():
    """Return the settings of ranks whose launcher starts a lost one again, so many times at most, but does not."""
    secret = uuid.uuid4().hex
    with serve_one_host(Place(0, 1, "job", secret)) as place:
        launcher = ("RINGCOMM_STORE", place.store), ("RINGCOMM_JOB_SECRET", secret), ("RINGCOMM_RESTARTS", "0")
        yield lambda restarts: (*launcher, ("RINGCOMM_MAX_RESTARTS", str(restarts)))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def until_broken(comm):
    def again_and_again():
        while True:
            comm.barrier()

    raised(RingcommError, again_and_again)


def used(comm, old=None):
    """Use a communicator; return this rank, and the size."""
    check_usable(comm)
    if old:
        assert "closed" in repr(old)
        assert "closed" in str(raised(RingcommError, old.barrier))
    result = comm.rank, comm.size
    comm.close()
    return result


# --- Who is left ------------------------------------------------------------------------------------------------------


def lose(comm, victims):
    if comm.rank in victims:
        die()
    until_broken(comm)
    return used(comm.shrink(), comm)


@pytest.mark.parametrize("victims", [(1,), (0,), (0, 2), (0, 1, 2)])
def test_survivors_go_on_in_their_old_order(victims):
    found, seconds = survivors_of(lose, 4, victims)
    left = [rank for rank in range(4) if rank not in victims]
    assert found == {rank: (left.index(rank), len(left)) for rank in left}
    assert seconds < PROMPT


def lose_more(comm, dies):
    if comm.rank == 1:
        die()
    if comm.rank == 3 and dies == "instead of its call":
        time.sleep(0.1)
        die()
    if comm.rank == 3:
        threading.Timer(0.1, die).start()
    until_broken(comm)
    if comm.rank == 4:
        time.sleep(0.3)
    return used(comm.shrink(), comm)


@pytest.mark.parametrize("dies", ["instead of its call", "in its call"])
def test_a_rank_that_dies_meanwhile_is_left_out(dies):
    found, seconds = survivors_of(lose_more, 5, dies)
    assert found == {0: (0, 3), 2: (1, 3), 4: (2, 3)}
    assert seconds < PROMPT


def lose_one_that_was_agreed_on(comm):
    """Rank 2 dies once the list is made, and before it uses the new communicator."""
    if comm.rank == 1:
        die()
    until_broken(comm)
    if comm.rank == 2:
        ShmTransport.__init__ = lambda *_: die()
    return used(comm.shrink(), comm)


def test_a_rank_that_dies_when_it_has_been_agreed_on_is_left_out():
    found, seconds = survivors_of(lose_one_that_was_agreed_on, 4)
    assert found == {0: (0, 2), 3: (1, 2)}
    assert seconds < PROMPT


def one_is_late(comm):
    if comm.rank == 3:
        die()
    until_broken(comm)
    if comm.rank == 2:
        time.sleep(1)
        error = raised(Aborted, comm.shrink)
        assert raised(Aborted, comm.shrink).args == error.args
        return error.rank, str(error)
    start = time.monotonic()
    shrunk = comm.shrink(timeout=0.3)
    end = time.monotonic()
    assert 0.3 <= end - min(shrunk.all_gather_object(start)) < 0.3 + PROMPT  # the time of the first to call it
    time.sleep(1)  # until it has come
    return used(shrunk, comm)


def test_a_rank_that_does_not_come_in_time_is_left_out_and_told_so():
    found, _ = survivors_of(one_is_late, 4)
    text = "rank 2 was left out: it called shrink when ranks 0 and 1 had continued without it"
    assert found == {0: (0, 2), 1: (1, 2), 2: (2, text)}


def warned(call):
    """Return the result of a call, and what it logs as a warning."""
    texts, log = [], logging.getLogger("ringcomm")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    log.addHandler(handler)
    try:
        return call(), texts
    finally:
        log.removeHandler(handler)


def one_runs_and_one_is_stopped(comm):
    pids = comm.all_gather_object(os.getpid())
    if comm.rank in (1, 2):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
        return raised(RingcommError, comm.shrink) and pids[comm.rank]
    raised(CollectiveTimeout, lambda: comm.barrier(timeout=0.1))
    shrunk, texts = warned(lambda: comm.shrink(timeout=0.3))
    used(shrunk, comm)
    os.kill(pids[1], signal.SIGCONT)
    return texts


def test_the_survivors_say_who_was_left_out():
    found, _ = survivors_of(one_runs_and_one_is_stopped, 5)
    text = "shrink left out rank {}: it did not call shrink in time, and its process {} {}"
    assert found[0] == [text.format(1, found[1], "is stopped"), text.format(2, found[2], "runs")]
    assert found[3] == found[4] == []


@pytest.mark.ranks(3, world="processes")
def test_ranks_that_wait_in_a_call_come_when_one_calls_shrink(comm):
    group = comm.split(0)
    if group.rank == 0:
        until_waiting(group, 1)
    else:  # they wait for rank 0, whose failure is its own
        assert str(raised(Aborted, group.barrier)) == "rank 0 has called shrink"
    check_usable(group.shrink(timeout=10))


def stopped_in_a_group(comm):
    """Rank 2 is stopped in a large call of a group. The others go on, and close; then it continues."""
    group, x = comm.split(0), np.empty(8 << 20)
    pids = comm.all_gather_object(os.getpid())

    def sum_again_and_again():
        while True:
            x[:] = 1
            group.all_reduce(x, timeout=0.5)
            assert (x == 3).all()

    if comm.rank == 2:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return str(raised(RingcommError, sum_again_and_again))
    raised(CollectiveTimeout, sum_again_and_again)
    used(group.shrink(timeout=0.5), group)
    time.sleep(0.3)  # until both have closed
    os.kill(pids[2], signal.SIGCONT)
    return None


def test_a_stopped_rank_that_was_left_out_gets_an_error_and_no_wrong_result():
    found, _ = survivors_of(stopped_in_a_group, 3)
    assert found[0] is found[1] is None
    assert "rank 2" in found[2]


def abort_and_shrink(comm):
    group = comm.split(0)
    for _ in range(3):  # also what was shrunk before
        if group.rank == 1:
            group.abort("enough")
        raised(Aborted, group.barrier)
        old, group = group, group.shrink()
        assert raised(RingcommError, old.barrier)
        assert group.size == comm.size
    check_usable(group)
    group.close()
    check_usable(comm)


@pytest.mark.parametrize("world", harness.WORLDS)
def test_an_aborted_communicator_goes_on_whole(world):
    harness.run(abort_and_shrink, 3, world=world)


def test_a_communicator_of_one_rank_goes_on():
    def shrink(comm):
        group = comm.split(0)
        group.abort("enough")
        check_usable(group.shrink())

    harness.run(shrink, 1, world="threads")


def in_a_group(comm):
    """Ranks 1 to 3 form a group and lose rank 2 of the world; the world goes on too."""
    group = comm.split(0 if comm.rank else None)
    if comm.rank == 2:
        die()
    if group:
        until_broken(group)
        shrunk = group.shrink()
        assert used(shrunk, group) == ([1, 3].index(comm.rank), 2)
    until_broken(comm)
    return used(comm.shrink(), comm)


def test_a_group_and_its_parent_each_go_on():
    found, _ = survivors_of(in_a_group, 4)
    assert found == {0: (0, 3), 1: (1, 3), 3: (2, 3)}


# --- What was pending, and memory -------------------------------------------------------------------------------------


def with_pending_calls(comm):
    x, y, other = np.ones(1 << 20), np.ones(10), comm.split(0)
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)] if comm.rank != 1 else []
    received = comm.recv(y, 1, async_op=True) if comm.rank != 1 else None
    with suppress(RingcommError):  # who has left it already ends it for the others
        other.barrier()
    if comm.rank == 1:
        die()
    shrunk = comm.shrink()  # without any call that would have raised
    for work in (*works, received):
        raised(RingcommError, work.wait)
    x[:] = y[:] = 7
    result = used(shrunk, comm)
    assert (x == 7).all()
    assert (y == 7).all()
    return result


def test_pending_calls_end():
    found, seconds = survivors_of(with_pending_calls, 3)
    assert found == {0: (0, 2), 2: (1, 2)}
    assert seconds < PROMPT


def with_memory(comm):
    symmetric = comm.empty(1000, "float64")
    symmetric[:] = comm.rank
    with comm.shared_arrays():
        shared = np.full(1 << 17, float(comm.rank))
    comm.all_reduce(shared)
    if comm.rank == 1:
        die()
    until_broken(comm)
    shrunk = comm.shrink()
    assert (symmetric == (0, 1, 2)[comm.rank]).all()
    assert (shared == 3).all()
    shrunk.all_reduce(shared)  # direct
    assert (shared == 6).all()
    with shrunk.shared_arrays():
        more = np.ones(1 << 17)
    shrunk.all_reduce(more)
    assert (more == 2).all()
    return used(shrunk, comm)


def test_shared_memory_stays():
    found, _ = survivors_of(with_memory, 3)
    assert found == {0: (0, 2), 2: (1, 2)}


@pytest.mark.ranks(2, world="processes")
def test_what_was_shrunk_gives_its_memory_back(comm):
    x, sizes = np.ones(1 << 18), []
    group = comm.split(0)
    for turn in range(20):
        group.all_reduce(x)
        group.abort("enough") if group.rank == 0 else raised(Aborted, group.barrier)
        group = group.shrink()
        if turn >= 2:
            comm.barrier()
            sizes.append(shared_bytes())
    group.close()
    assert max(sizes) - sizes[0] <= 20 * 3 * 4096  # their failures, and who was left


# --- grow -------------------------------------------------------------------------------------------------------------


def grow_alone(comm):
    assert comm.grow(timeout=0.1) is comm  # nobody is missing
    group = comm.split(0)
    text = str(raised(ArgumentError, group.grow))
    group.close()
    check_usable(comm)
    return text


def test_a_complete_communicator_stays_as_it_is_and_a_part_cannot_grow(launched):
    text = "grow needs a communicator of all ranks, started with ringcomm run --respawn"
    assert harness.run(grow_alone, 2, settings=launched(1)) == [text] * 2


def test_without_respawn_no_communicator_can_grow():
    assert "--respawn" in str(harness.run(lambda comm: raised(ArgumentError, comm.grow), 1, world="threads")[0])


def refused_at_once(comm):
    if comm.rank == 1:
        die()
    until_broken(comm)
    shrunk = comm.shrink()
    start = time.monotonic()
    text = str(raised(ArgumentError, lambda: shrunk.grow(timeout=harness.OPERATION)))
    assert time.monotonic() - start < PROMPT
    used(shrunk, comm)
    return text


def test_where_nothing_starts_a_lost_rank_again_grow_is_refused_at_once(launched):
    found, _ = survivors_of(refused_at_once, 3, settings=launched(0))
    text = "grow: nothing restarts a lost rank; use ringcomm run --respawn N, with N of 1 or more"
    assert found == {0: text, 2: text}


def lose_and_wait(comm):
    if comm.rank == 1:
        die()
    until_broken(comm)
    shrunk = comm.shrink()
    start = time.monotonic()
    assert shrunk.grow(timeout=0.3) is shrunk
    assert time.monotonic() - start >= 0.3
    return used(shrunk, comm)


def test_without_any_rank_that_comes_back_it_stays_as_it_is(launched):
    found, _ = survivors_of(lose_and_wait, 3, settings=launched(1))
    assert found == {0: (0, 2), 2: (1, 2)}
