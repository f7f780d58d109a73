"""Collectives of GPUs between hosts, on the emulated device: failures and ends."""

import os
import signal
import threading
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

import harness
from cases.between_hosts import CHUNK, on_layouts, run_on
from cases.on_device import Gate
from cases.reference import assert_same
from harness.failures import raised, survivors_of, until, until_broken
from ringcomm import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    MemoryShortage,
    MismatchError,
    PeerLost,
    RingcommError,
)
from ringcomm.devices import emulated
from ringcomm.transports.staged.queue import CallQueue

Device = emulated.EmulatedDevice
on_hosts = pytest.mark.parametrize("layout", ["01", "0011"])


as_on_a_gpu = pytest.mark.usefixtures("streams_as_on_a_gpu")
pytestmark = pytest.mark.usefixtures("small_chunks")
SHORT = 0.2  # seconds in which nothing must happen


def large(more=0):
    return emulated.array(np.ones(10 * CHUNK + more))


def check_mismatch(comm):
    comm.all_reduce(large())
    error = raised(MismatchError, lambda: comm.all_reduce(large(comm.rank)))
    assert "rank 1: all_reduce(float64 x 10241, sum) on GPUs" in str(error)
    error = raised(MismatchError, lambda: comm.all_gather(large()) if comm.rank else comm.barrier())
    assert "on GPUs" in str(error)
    comm.all_reduce(large(comm.rank), async_op=True)  # dropped
    until(lambda: isinstance(outcome(comm.check), MismatchError), "the error of the dropped call")
    assert_same(comm.all_reduce(large()), np.full(10 * CHUNK, float(comm.size)))


def outcome(call):
    try:
        return call()
    except RingcommError as error:
        return error


@on_hosts
def test_a_mismatch_of_large_arrays_is_named_and_leaves_the_group_usable(layout):
    run_on(layout, check_mismatch)


@pytest.mark.usefixtures("no_peer_access")
def test_a_mismatch_of_gpus_that_do_not_reach_each_other():
    harness.run(check_mismatch, 2, world="threads")


def check_mismatch_before(comm):
    """Rank 0 has returned from a broadcast that differs."""
    comm.all_reduce(large())
    rows, out = [5 * CHUNK] * comm.size, emulated.array(np.zeros(10 * CHUNK))
    for call in (comm.all_reduce, lambda x: comm.all_to_all(x, out, rows, rows)):
        with suppress(MismatchError):
            comm.broadcast(np.ones(2 + (comm.rank != 0)))
        if comm.rank == 0:
            assert "broadcast" in str(raised(MismatchError, lambda call=call: call(large())))
        else:
            call(large())
        assert_same(comm.all_reduce(large()), np.full(10 * CHUNK, float(comm.size)))


@pytest.mark.usefixtures("no_peer_access")
def test_a_mismatch_of_a_call_before_is_raised_after_the_last_chunk():
    """The other ranks do all chunks: a rank that left earlier would stay calls behind them."""
    harness.run(check_mismatch_before, 2, world="threads")


@pytest.mark.parametrize("async_op", [False, True])
@on_layouts("01", "0011", timeout=1.0)
def test_a_late_rank_is_named_on_all(comm, async_op):
    comm.all_reduce(large())
    if comm.rank == 1:
        until_broken(comm)
    started = comm.all_reduce if comm.rank == 1 or not async_op else lambda x: comm.all_reduce(x, async_op=True).wait()
    error = raised(CollectiveTimeout, lambda: started(large()))
    assert "it was not called by rank 1" in str(error)
    raised(CollectiveTimeout, comm.barrier)


@as_on_a_gpu
@on_layouts("01")
def test_a_wait_that_is_too_long_breaks_the_group(comm):
    gate, x = Gate(), large()
    with emulated.Stream() as stream:
        if comm.rank == 0:
            gate.hold(stream)
        work = comm.all_reduce(x, async_op=True)
    error = raised(CollectiveTimeout, lambda: work.wait(SHORT if comm.rank == 0 else None))
    assert "rank 0 waited 0.2 s" in str(error)
    gate.open()


def check_end(comm, end, started):
    gate = Gate()
    with emulated.Stream() as stream:
        gate.hold(stream)
        work = comm.all_reduce(large(), async_op=True)
    started.wait(harness.OPERATION)
    if end == "close" or comm.rank == 0:
        getattr(comm, end)(*["wrong data"][: end == "abort"])
    error = raised(Aborted if end == "abort" else RingcommError, work.wait)
    assert "wrong data" in str(error) or "closed" in str(error)
    gate.open()
    stream.synchronize()


@pytest.mark.parametrize("end", ["abort", "close"])
@on_hosts
@as_on_a_gpu
def test_a_call_behind_a_gate_ends(layout, end):
    run_on(layout, check_end, end, threading.Barrier(len(layout)))


@on_layouts("01", "0011")
def test_a_closed_communicator_takes_no_call(comm):
    comm.all_reduce(large())
    comm.all_reduce(large(), async_op=True).wait()
    comm.barrier()
    comm.close()
    for async_op in (False, True):
        error = raised(ArgumentError, lambda async_op=async_op: comm.all_reduce(large(), async_op=async_op))
        assert "this communicator is closed" in str(error)
    comm.close()


def check_close_in_the_middle(comm, monkeypatch, have_left):
    comm.all_reduce(large())
    copy, inside = Device.copy, threading.local()

    def closing(device, *arguments):
        if getattr(inside, "here", False):  # as a signal handler in this thread
            inside.here = False
            comm.close()
        copy(device, *arguments)

    monkeypatch.setattr(Device, "copy", closing) if comm.rank == 0 else None
    have_left.wait(harness.OPERATION)
    inside.here = comm.rank == 0
    error = raised(RingcommError, lambda: comm.all_reduce(large()))
    assert "rank 0" in str(error) or "closed" in str(error)
    comm.close()


@on_hosts
def test_a_signal_handler_may_close_in_the_middle_of_a_call(layout, monkeypatch):
    run_on(layout, check_close_in_the_middle, monkeypatch, threading.Barrier(len(layout)))


def check_interrupt(comm, interrupted):
    comm.all_reduce(large())
    interrupted.fail(comm.rank == 1)
    error = raised((KeyboardInterrupt, Aborted), lambda: comm.all_reduce(large()))
    assert type(error) is KeyboardInterrupt or "rank 1 was interrupted by a signal" in str(error)
    interrupted.here.fails = False
    raised(Aborted, comm.barrier)


@on_hosts
def test_an_interrupt_in_a_call_reaches_all_ranks(layout, monkeypatch):
    run_on(layout, check_interrupt, Broken(monkeypatch, layout, "copy", (KeyboardInterrupt, "")))


class Broken:
    """A method of the device that fails on one rank, once the GPUs are connected.

    All must have left the calls before: the failure would end these too.
    """

    def __init__(self, monkeypatch, layout, name, error):
        self.here, method = threading.local(), getattr(Device, name)
        self.have_left = threading.Barrier(len(layout))

        def broken(device, *arguments):
            if getattr(self.here, "fails", False):
                raise error[0](error[1])  # an instance would keep its frames, and the communicator
            return method(device, *arguments)

        monkeypatch.setattr(Device, name, broken)

    def fail(self, here):
        self.have_left.wait(harness.OPERATION)
        self.here.fails = here


def check_broken(comm, broken, kind, text):
    comm.all_reduce(emulated.array(np.ones(1)))
    broken.fail(comm.rank == 1)
    for _ in range(2):
        assert text in str(raised(kind, lambda: comm.all_gather(large())))
    broken.here.fails = False


ILLEGAL = RuntimeError, "an illegal memory access was encountered"
FAILURES = [
    ("copy", ILLEGAL, RingcommError, "emulated has failed: an illegal memory access was encountered"),
    ("record_event", ILLEGAL, RingcommError, "emulated has failed: an illegal memory access was encountered"),
    ("allocate_pinned", (MemoryShortage, "pinned host memory: out of memory"), MemoryShortage, "out of memory"),
]


@pytest.mark.parametrize(
    ("name", "error", "kind", "text"), FAILURES, ids=lambda each: each if type(each) is str else ""
)
@on_hosts
def test_what_fails_on_one_gpu_is_raised_on_all(layout, name, error, kind, text, monkeypatch):
    run_on(layout, check_broken, Broken(monkeypatch, layout, name, error), kind, text)


def test_the_first_error_of_dropped_calls_is_kept():
    def fail(number):
        raise MismatchError(f"call {number}")

    queue = CallQueue(0, defer=lambda _: None, fail=lambda _: None)
    for number in range(2):
        queue.add("all_reduce", partial(fail, number)).ended.wait()
    queue.close()
    assert str(queue.take_unraised()) == "call 0"
    assert queue.take_unraised() is None


def die(comm):
    comm.all_reduce(large())
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(PeerLost, lambda: [comm.all_gather(large()) for _ in range(100)])
    assert error.rank == 0


def test_a_dead_rank_of_another_host_is_named():
    assert survivors_of(die, "0011")[0] == dict.fromkeys(range(1, 4))


@on_layouts("01")
def test_a_staged_call_cannot_be_captured(comm):
    stream = emulated.Stream()
    with emulated.capture(stream), stream:
        error = raised(ArgumentError, lambda: comm.all_reduce(emulated.array(np.ones(5))))
    assert "calls staged in host memory, cannot be captured into a CUDA graph" in str(error)
    assert_same(comm.all_reduce(emulated.array(np.ones(5))), np.full(5, float(comm.size)))
