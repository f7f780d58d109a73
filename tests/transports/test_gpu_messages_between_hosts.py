"""Messages of arrays on GPUs of several hosts, on the emulated device: values, pinned memory, streams, failures."""

import os
import signal
import threading

import numpy as np
import pytest

import harness
from cases.between_hosts import on_layouts, run_on
from cases.gpu_messages import (
    ALL,
    SLOT,
    all_to_all,
    at_random,
    device_array,
    every_call,
    mixed,
    out_of_order,
    values,
    wrong_size,
)
from cases.on_device import Gate, synchronize
from cases.reference import assert_same
from harness.failures import raised, survivors_of, until_broken
from ringcomm import Aborted, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.devices import emulated

SHORT = 0.2  # seconds in which nothing must happen
PINNED = 10 << 20  # bytes for the messages of a communicator, at most (bindings/src/cuda/messages.cpp)

pytestmark = pytest.mark.usefixtures("streams_as_on_a_gpu")


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "link"), [("01", "sockets"), ("0011", "sockets"), ("01", "ucx")])
def test_every_call(layout, link):
    run_on(layout, every_call, link=link)


def test_blocking_calls(monkeypatch):
    monkeypatch.setattr(emulated.EmulatedDevice, "blocking", True)
    run_on("01", every_call)


@pytest.mark.parametrize("scene", [mixed, out_of_order, wrong_size])
def test_two_hosts_match_messages_as_one(scene):
    run_on("01", scene)


def test_all_to_all_of_three_hosts():
    run_on("0112", all_to_all)


@pytest.mark.parametrize("layout", ["01", "001", "012"])
def test_random_messages(layout):
    run_on(layout, at_random, 7)


@on_layouts("01")
def test_large_messages_pass_through_bounded_pinned_memory(comm):
    """Send far more at once than there is pinned memory."""
    other, size, tags = 1 - comm.rank, 9_000_001, range(3)
    comm.sendrecv(device_array(1, 0), other, emulated.empty(1, np.uint8), other)  # connects
    comm.barrier()
    before = emulated.pinned_bytes()
    comm.barrier()
    sent = [device_array(size, 10 * comm.rank + tag) for tag in tags]
    got = [emulated.empty(size, np.uint8) for _ in tags]
    works = [comm.recv(got[tag], other, tag, async_op=True) for tag in reversed(tags)]
    works += [comm.send(sent[tag], other, tag, async_op=True) for tag in tags]
    for work in works:
        work.synchronize()
    for tag in tags:
        assert_same(got[tag], values(size, 10 * other + tag))
    comm.barrier()
    used = emulated.pinned_bytes() - before
    comm.barrier()
    assert 1 << 20 <= used <= 2 * PINNED


# --- Streams ----------------------------------------------------------------------------------------------------------


def behind_gates(comm, size, arrived):
    """Neither the array that is sent nor the one that is overwritten is ready at first."""
    other, gate, x = 1 - comm.rank, Gate(), device_array(size, 5)
    late = threading.Timer(harness.OPERATION / 4, gate.open)  # so that a call that blocks ends
    late.start()
    with emulated.Stream() as stream:
        gate.hold(stream)
        if comm.rank == 0:
            stream.add(lambda: x.fill(7))
            work = comm.send(x, other, async_op=True)
            assert not gate.opened()
            gate.open()
            assert arrived.wait(harness.OPERATION)
            work.wait()
        else:
            seen, called = [], threading.Event()
            stream.add(lambda: seen.append(x.copy()))
            work = comm.recv(x, None, async_op=True)
            work.add_done_callback(lambda _: called.set())
            assert not called.wait(SHORT)
            arrived.set()
            gate.open()
            assert work.wait() == other
            stream.synchronize()
            assert_same(seen[0], values(size, 5))
            assert_same(x, np.full(size, 7, np.uint8))
    late.cancel()


@pytest.mark.parametrize("size", [100, SLOT, 2 * ALL])
def test_a_message_waits_for_the_streams_of_both_ends_and_the_program_does_not(size):
    run_on("01", behind_gates, size, threading.Event())


@on_layouts("01")
def test_a_message_on_a_stuck_stream_holds_up_no_other(comm):
    """A message whose stream does not go on holds up no other."""
    other, gate = 1 - comm.rank, Gate()
    late, x = emulated.Stream(), device_array(2 * ALL, comm.rank)
    held, out = emulated.empty(2 * ALL, np.uint8), emulated.empty(2 * ALL, np.uint8)
    with late:
        gate.hold(late)
        works = [comm.recv(held, other, 1, async_op=True), comm.send(x, other, 1, async_op=True)]
    for _ in range(3):
        comm.sendrecv(x, other, out, other)
        synchronize()
        assert_same(out, values(2 * ALL, other))
    assert not any(work.done() for work in works)
    gate.open()
    for work in works:
        work.synchronize()
    assert_same(held, values(2 * ALL, other))


# --- Failures and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["rank", "stream"])
@on_layouts("01")
def test_a_message_that_is_not_received_in_time(comm, who):
    """Rank 1 does not receive, or its stream does not come to the receive."""
    x, gate = device_array(2 * ALL, 0), Gate()
    if comm.rank == 0:
        error = raised(CollectiveTimeout, lambda: comm.send(x, 1, timeout=SHORT))
        assert "rank 0 waited 0.2 s for send" in str(error)
        return
    with emulated.Stream() as stream:
        gate.hold(stream)
        work = comm.recv(x, 0, async_op=True) if who == "stream" else None
        until_broken(comm)
        gate.open()
        if work:
            raised(CollectiveTimeout, work.wait)
    assert_same(x, values(2 * ALL, 0))


def error_of(work):
    try:
        work.synchronize()
    except RingcommError as error:
        return error


def ended(comm, end, begun):
    """Rank 1 ends while messages to it, and from it, are on their way."""
    x, out, other = device_array(30_000_000, 1), emulated.empty(30_000_000, np.uint8), 1 - comm.rank
    works = [comm.recv(out, other, async_op=True), comm.send(x, other, async_op=True)]
    begun.wait(harness.OPERATION)
    if comm.rank == 1:
        getattr(comm, end)(*["wrong data"][: end == "abort"])
    for error in map(error_of, works):
        assert error is None or isinstance(error, Aborted if end == "abort" else RingcommError)
        assert error is None or "wrong data" in str(error) or "closed" in str(error)
    out.fill(0)  # nothing writes there any more
    comm.close()
    assert not out.any()


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_rank_ends_in_the_middle_of_large_messages(end):
    run_on("01", ended, end, threading.Barrier(2))


@on_layouts("01")
def test_a_sender_may_close_before_its_message_is_received(comm):
    """What is sent before a rank closes is received all the same."""
    group, x = comm.split(0), device_array(SLOT, 1)
    if comm.rank == 0:
        group.send(x, 1)
    else:
        group.recv(out := emulated.empty(SLOT, np.uint8), 0)
        synchronize()
        assert_same(out, values(SLOT, 1))
    group.close()


def die(comm):
    x, out = device_array(3_000_000, 0), emulated.empty(3_000_000, np.uint8)
    if comm.rank == 0:
        comm.send(x, 1)
        comm.send(x, 1, async_op=True)
        comm.recv(np.empty(1), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(out, 0)
    assert_same(out, values(3_000_000, 0))
    comm.send(np.empty(1), 0)
    return raised(PeerLost, lambda: [comm.recv(out, 0) for _ in range(2)]).rank


def test_a_sender_of_another_host_that_dies_is_named():
    assert survivors_of(die, "01")[0] == {1: 0}
