"""The thread that watches launches, on the emulated driver."""

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import harness
from cases.on_device import Gate, connected
from cases.reference import assert_same
from harness.failures import until
from ringcomm import Communicator, RingcommError
from ringcomm.devices import emulated
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda.watch import Watch

pytestmark = pytest.mark.usefixtures("streams_as_on_a_gpu")


def unwatched(comm):
    def call():
        while True:
            work = comm.all_reduce(emulated.array(np.ones(5)), async_op=True)
            work.add_done_callback(print)  # the thread is to tell
            comm.check()

    connected(comm)
    comm.barrier()
    with pytest.raises(RingcommError, match="emulated can no longer be watched: OSError: broken"):
        call()


def test_the_end_of_the_watching_thread_is_a_failure(monkeypatch, caplog):
    poll = Watch.poll

    def broken(watch):
        if threading.current_thread().name == "ringcomm GPU":
            raise OSError("broken")
        poll(watch)

    monkeypatch.setattr(Watch, "poll", broken)
    run_threads(unwatched, [Communicator(end) for end in connect_threads(shm.connect, 2)])
    caplog.clear()  # tracebacks, which would keep memory alive


@pytest.mark.ranks(1, world="threads")
def test_the_end_of_a_call_is_noticed_soon_after_a_time_without_calls(comm):
    """Count how often the watching thread asks the driver before it notices the end of a call."""
    connected(comm)
    x = emulated.array(np.ones(5))

    def soon():
        gate, ended = Gate(), threading.Event()
        with emulated.Stream() as stream:
            gate.hold(stream)
            work = comm.all_reduce(x, async_op=True)
        before, begin = emulated.calls().stream_queries, time.monotonic()
        work.add_done_callback(lambda _: ended.set())
        until(lambda: emulated.calls().stream_queries >= before + 10, "ten looks")
        spent = time.monotonic() - begin
        gate.open()
        assert ended.wait(harness.OPERATION)
        work.wait()
        return spent < 0.015  # with the longest pauses, of 2 ms each, ten take 18 ms at least

    assert any(soon() for _ in range(50))  # the machine may be busy


@pytest.mark.ranks(1, world="threads")
def test_the_watching_thread_sleeps_without_calls_until_one_comes(comm):
    connected(comm)
    x = emulated.array(np.ones(5))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "ringcomm GPU")
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def wakes():
        return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)[1])

    def sleeps():
        before = wakes()
        time.sleep(0.3)  # while calls run, and for a second after, it wakes ten times a second
        return wakes() == before

    before = wakes()
    until(lambda: wakes() > before, "the watching thread")
    until(sleeps, "its sleep")
    before = wakes()
    ended = threading.Event()
    with emulated.Stream():
        work = comm.all_reduce(x, async_op=True)
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(harness.OPERATION)
    assert wakes() > before
    work.wait()


def check_until_it_fails(comm, errors):
    while not errors:
        try:
            comm.check()
        except RingcommError as error:
            errors.append(error.with_traceback(None))


def failing_at_once(comm):
    connected(comm)
    x = emulated.array(np.ones(5))
    for op in ("max", "min"):
        comm.all_reduce(x, op)  # loads: the calls that follow take the fast path
    comm.barrier()
    emulated.configure(await_launches=True)
    comm.barrier()
    for _ in range(2):
        errors = []
        checking = threading.Thread(target=check_until_it_fails, args=(comm, errors))
        checking.start()  # also while the launch has not returned
        comm.all_reduce(x, "max" if comm.rank == 1 else "min")
        checking.join()
        assert "rank 1: all_reduce(float64 x 5, max)" in str(errors[0])
        assert_same(x, np.ones(5))
    assert_same(comm.all_reduce(emulated.array(np.ones(5)), async_op=True).synchronize(), np.full(5, float(comm.size)))


def test_a_kernel_may_fail_before_its_launch_has_returned():
    try:
        harness.run(failing_at_once, 3, world="threads")
    finally:
        emulated.configure()
