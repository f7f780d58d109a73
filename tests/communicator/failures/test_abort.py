"""Abort, exceptions in the `with` block, signals, close."""

import contextlib
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import harness
import ringcomm
from harness.failures import PROMPT, check_usable, raised, until_broken, until_waiting
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.communicator import open_transports

LARGE = 300_001

# What a rank may be waiting for when the group ends; rank 0 never does its part.
WAITS = {
    "barrier": lambda comm, x: comm.barrier(),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "recv": lambda comm, x: comm.recv(x, 0),
    "recv from any rank": lambda comm, x: comm.recv(x),
    "send": lambda comm, x: comm.send(x, 0),
    "sendrecv": lambda comm, x: comm.sendrecv(x, 0, x.copy(), 0),
    "queued all_reduce": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
    "queued recv": lambda comm, x: comm.recv(x, 0, async_op=True).wait(),
    "behind a queue": lambda comm, x: (comm.all_reduce(x, async_op=True), comm.barrier()),
    "object": lambda comm, x: comm.all_gather_object("me"),
    "split": lambda comm, x: comm.split(0),
    "empty": lambda comm, x: comm.empty(3, "int8"),
}


def abort_others(comm, name):
    group = comm.split(0)
    x = np.full(LARGE, 7.0)
    if group.rank == 0:
        for rank in range(1, group.size):
            until_waiting(group, rank)
        start = time.monotonic()
        group.abort("the data is wrong")
        error = raised(Aborted, group.barrier)
    else:
        error = raised(Aborted, lambda: WAITS[name](group, x))
        start = time.monotonic()
    assert str(error) == "rank 0 aborted: the data is wrong"
    assert error.rank == 0
    for call in (group.barrier, group.check, lambda: group.recv(x), lambda: group.all_reduce(x, async_op=True)):
        assert str(raised(Aborted, call)) == str(error)
    assert (x == 7).all()
    group.close()
    check_usable(comm)
    return start


@pytest.mark.parametrize("name", WAITS)
def test_abort_ends_every_wait_with_its_reason(name, world):
    times = harness.run(abort_others, 3, name, world=world)
    assert max(times) - min(times) < PROMPT


@pytest.mark.ranks(2)
def test_a_nul_does_not_cut_a_reason(comm):
    group = comm.split(0)
    if comm.rank == 0:
        group.abort("before\0after")
    assert str(raised(Aborted, group.barrier)) == r"rank 0 aborted: before\0after"
    group.close()
    comm.barrier()


@pytest.mark.parametrize("character", ["x", "ü", "雪"])
@pytest.mark.ranks(2)
def test_a_long_reason_is_cut_between_characters(comm, character):
    reason = character * 10_000
    group = comm.split(0)
    if comm.rank == 0:
        group.abort(reason)
    text = str(raised(Aborted, group.barrier)).removeprefix("rank 0 aborted: ")
    assert len(text) > 1000
    assert text.startswith(reason[:1000])
    assert set(text[1000:-1]) <= set(reason)
    group.close()
    comm.barrier()


def abort_twice(comm):
    group = comm.split(0)
    comm.barrier()
    group.abort(f"rank {comm.rank} was first")
    reasons = {str(raised(Aborted, group.barrier)), str(raised(Aborted, group.check))}
    comm.barrier()
    group.abort("too late")
    reasons.add(str(raised(Aborted, group.barrier)))
    return reasons


def test_the_first_abort_reason_is_kept(world):
    first, *others = harness.run(abort_twice, 4, world=world)
    assert len(first) == 1
    assert all(reasons == first for reasons in others)


@pytest.mark.ranks(3)
def test_abort_ends_queued_calls_in_order(comm):
    """Rank 0 aborts while large calls move data: they end, and no rank writes after that."""
    group = comm.split(0)
    arrays = [np.ones(LARGE) for _ in range(20)]
    works = [group.all_reduce(x, async_op=True) for x in arrays]
    if comm.rank == 0:
        works[0].wait()
        group.abort("enough")
    ends = []
    for work in works:
        try:
            work.wait()
            ends.append("done")
        except Aborted as error:
            ends.append(str(error))
    assert ends == sorted(ends, key=lambda end: end != "done"), "none is done after one was aborted"
    assert set(ends[1:]) <= {"done", "rank 0 aborted: enough"}
    frozen = [x.copy() for x in arrays]
    comm.barrier()
    for x, before, end in zip(arrays, frozen, ends, strict=True):
        np.testing.assert_array_equal(x, before)
        assert end != "done" or (x == comm.size).all()
    group.close()
    check_usable(comm)


class OnPurposeError(Exception):
    pass


class UnprintableError(Exception):
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OnPurposeError("the disk is full", 7), "OnPurposeError: ('the disk is full', 7)"),
        (OnPurposeError("file \udc80"), "OnPurposeError: file \\udc80"),
        (UnprintableError(), "UnprintableError"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt("now"), "KeyboardInterrupt: now"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.ranks(3)
def test_an_exception_that_leaves_the_block_aborts_the_other_ranks(comm, error, text):
    group = comm.split(0)
    if comm.rank == 1:
        with pytest.raises(type(error)), group:
            raise error
        assert "closed" in str(raised(ArgumentError, group.barrier))
    else:
        aborted = raised(Aborted, group.barrier)
        assert (str(aborted), aborted.rank) == (f"rank 1 aborted: {text}", 1)
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_group_failure_that_leaves_the_block_stays_the_first_reason(comm):
    """An error that the group itself raised stays the first reason."""
    group = comm.split(0)
    if comm.rank == 0:
        group.close()
    else:
        with pytest.raises(PeerLost) as caught, group:
            group.barrier()
        assert caught.value.rank == 0
    check_usable(comm)


# --- Signals ----------------------------------------------------------------------------------------------------------


class StopError(Exception):
    pass


def stop(*_):
    raise StopError("by the handler")


def interrupt(comm, name, number):
    """Rank 0 sends a signal to rank 1, which waits for it."""
    group = comm.split(0)
    pids = comm.all_gather(np.array(os.getpid()))
    x = np.full(LARGE, 7.0)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        if comm.rank == 0:
            until_waiting(group, 1)
            start = time.monotonic()
            os.kill(pids[1], number)
            error = until_broken(group)
        elif comm.rank == 1:
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else StopError) as caught:
                WAITS[name](group, x)
            start = time.monotonic()
            assert number == signal.SIGINT or str(caught.value) == "by the handler"
            error = raised(Aborted, group.barrier)
        else:
            error = raised(Aborted, lambda: group.recv(x, 1, tag=2))
            start = time.monotonic()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert str(error).startswith("rank 1 was interrupted by a signal during ")
    assert error.rank == 1
    assert str(raised(Aborted, group.barrier)) == str(error)
    assert (x == 7).all()
    group.close()
    check_usable(comm)
    return start


@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, signal.SIGINT) for name in WAITS), ("all_reduce", signal.SIGTERM), ("recv", signal.SIGTERM)],
)
def test_a_signal_ends_a_wait_and_the_others_are_aborted(name, number):
    times = harness.run(interrupt, 3, name, number)
    assert max(times) - min(times) < PROMPT


@pytest.mark.ranks(2, world="processes")
def test_nothing_is_written_after_a_wait_that_a_signal_has_ended(comm):
    """A signal arrives while a queued call moves data."""
    group = comm.split(0)
    x = np.ones(1 << 24, np.float32)
    before = signal.signal(signal.SIGALRM, stop)
    comm.barrier()
    works = [group.all_reduce(x, async_op=True) for _ in range(20)]
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        raised(StopError, works[-1].wait)
        frozen = x.copy()
    else:
        with contextlib.suppress(Aborted):  # unless all calls were done before the wait of rank 0 saw the signal
            works[-1].wait()
            assert (x == x[0]).all()
    signal.signal(signal.SIGALRM, before)
    comm.barrier()
    assert comm.rank or (x == frozen).all(), "the array was written when wait() had been left"


@pytest.mark.parametrize("name", ["barrier", "recv", "queued all_reduce"])
@pytest.mark.ranks(2, world="processes")
def test_a_handled_signal_changes_nothing(comm, name):
    group = comm.split(0)
    pids = comm.all_gather(np.array(os.getpid()))
    x = np.ones(LARGE)
    if comm.rank == 0:
        until_waiting(group, 1)
        os.kill(pids[1], signal.SIGTERM)
        comm.recv(np.empty(1), 1)  # sent by the handler
        if name == "recv":
            group.send(x, 1)
        else:
            WAITS[name](group, x)
    else:
        before = signal.signal(signal.SIGTERM, lambda *_: comm.send(np.ones(1), 0))
        WAITS[name](group, x)
        signal.signal(signal.SIGTERM, before)
    check_usable(group)


# --- Closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.ranks(2)
def test_close_wakes_the_waiters_of_its_rank(comm, name):
    """Two threads of rank 1 wait, a third closes."""
    group = comm.split(0)
    x = np.ones(LARGE)
    if comm.rank == 0:
        until_waiting(group, 1)
        comm.barrier()
    else:
        errors = []

        def wait():
            errors.append(raised(RingcommError, lambda: WAITS[name](group, x)))

        waiters = [threading.Thread(target=wait) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        comm.barrier()
        group.close()
        for waiter in waiters:
            waiter.join(harness.OPERATION)
            assert not waiter.is_alive()
        for error in errors:
            assert isinstance(error, ArgumentError)
            assert "closed" in str(error)
        group.close()
    assert (x == 1).all()
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_closed_communicator_refuses_every_call(comm):
    group = comm.split(0)
    x = np.ones(2)
    work = group.all_reduce(x, async_op=True)
    pending = group.recv(np.ones(1), group.rank, async_op=True)
    work.wait()
    comm.barrier()
    group.close()
    group.close()
    assert "closed" in repr(group)
    for call in (
        group.barrier,
        lambda: group.all_reduce(x),
        lambda: group.all_reduce(x, async_op=True),
        lambda: group.send(x, 0),
        lambda: group.recv(x),
        lambda: group.split(0),
        lambda: group.empty(1, "int8"),
        lambda: group.broadcast_object("x"),
        lambda: group.abort("closed already"),
        group.check,
        group.report,
        pending.wait,
    ):
        assert "closed" in str(raised(ArgumentError, call))
    assert work.wait() is x
    with group:  # leaving closes once more
        pass
    check_usable(comm)


@pytest.mark.ranks(3)
def test_a_communicator_that_is_collected_is_closed(comm):
    """A communicator without references closes itself, even with pending works; completed results stay."""
    group = comm.split(0)
    x = np.ones(LARGE)
    works = [group.all_reduce(x, async_op=True) for _ in range(3)]
    works[-1].wait()
    pending = group.recv(np.ones(1), group.rank, async_op=True)
    dead = weakref.ref(group)
    comm.barrier()
    del group
    gc.collect()
    assert dead() is None
    assert "closed" in str(raised(ArgumentError, pending.wait))
    assert (x == comm.size**3).all()
    check_usable(comm)


@pytest.mark.ranks(2, world="processes")
def test_leaving_the_block_always_closes_the_communicator(comm):
    group = comm.split(0)
    group.abort = lambda _: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), group:
        raise OnPurposeError
    assert "closed" in str(raised(ArgumentError, group.barrier))


def test_a_close_that_raises_has_closed_the_communicator(monkeypatch):
    comm = ringcomm.init()
    transport, close = comm._transport, type(comm._transport).close

    def close_and_lose_messages(self):
        close(self)
        raise CollectiveTimeout("there is no room for 3 sent messages")

    monkeypatch.setattr(type(transport), "close", close_and_lose_messages)
    raised(CollectiveTimeout, comm.close)
    assert repr(comm).endswith("closed>")
    assert transport not in open_transports
