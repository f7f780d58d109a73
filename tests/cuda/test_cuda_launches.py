"""The path from an array to a launch, on the emulated driver: streams, and what is left to Python."""

import gc
import os
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import harness
import ringcomm
from cases.on_device import Gate, connected, synchronize
from cases.reference import assert_same
from harness.failures import PROMPT
from ringcomm import MismatchError, PeerLost, RingcommError
from ringcomm.devices import emulated
from ringcomm.transports.cuda import group

pytestmark = pytest.mark.usefixtures("streams_as_on_a_gpu")

LENGTHS = (1, 50, 300, 5000)  # for all_reduce on 3 ranks every kernel of it
SHORT = 0.3  # seconds, of a wait that times out


@pytest.mark.ranks(3, world="threads")
def test_plain_calls_are_launched_without_python(comm):
    connected(comm)
    rank, size = comm.rank, comm.size
    called = group.CudaGroup.call

    def refuse(*call):
        raise AssertionError(f"Python launches {call}")

    for length in LENGTHS:
        x, row = emulated.array(np.ones((size, length))), emulated.array(np.ones(length))
        results = [comm.all_reduce(x), comm.reduce(x), comm.broadcast(x)]  # their kernels are loaded
        results += [comm.reduce_scatter(x), comm.all_gather(row)]
        synchronize()
        del results
    comm.barrier()
    try:
        group.CudaGroup.call = refuse
        for length in LENGTHS:
            inputs = np.stack([np.arange(size * length).reshape(size, length) + r for r in range(size)]) * 1.0
            x, y, z, w, out = (emulated.array(inputs[rank]) for _ in range(5))
            row, share = (emulated.array(inputs[rank, 0]) for _ in range(2))
            results = [
                (comm.all_reduce(y), inputs.sum(0)),
                (comm.reduce(z, root=1), inputs.sum(0) if rank == 1 else None),
                (comm.broadcast(w, 1), inputs[1]),
                (comm.all_gather(row), inputs[:, 0]),
                (comm.gather(row, root=1), inputs[:, 0] if rank == 1 else None),
                (comm.scatter(x if rank == 1 else None, share, root=1), inputs[1, rank]),
                (comm.reduce_scatter(x), inputs.sum(0)[rank : rank + 1]),
                (comm.all_to_all(x, out=out), inputs[:, rank]),
            ]
            synchronize()
            for found, expected in results:
                assert (found is None) == (expected is None)
                if expected is not None:
                    assert isinstance(found, emulated.Array)
                    assert_same(found, expected)
        comm.barrier()
    finally:
        group.CudaGroup.call = called


@pytest.mark.ranks(2, world="threads")
def test_a_plain_call_keeps_no_objects(comm):
    x = emulated.array(np.ones(8, np.float32))
    for _ in range(100):
        comm.all_reduce(x)
    before = sys.getallocatedblocks()
    for _ in range(200):
        comm.all_reduce(x)
    after = sys.getallocatedblocks()
    synchronize()
    comm.barrier()
    assert after - before < 20  # of 200 calls


@pytest.mark.ranks(1, world="threads")
def test_calls_on_one_stream_record_no_events(comm):
    x, own, work = emulated.array(np.ones(8)), emulated.Stream(), []
    comm.all_reduce(x)  # connects
    for stream in (emulated.device.stream(), own):  # to the second one it changes once
        with stream:
            comm.all_reduce(x)
            before = emulated.calls()
            work += [comm.all_reduce(x) for _ in range(50)]
            after = emulated.calls()
            stream.synchronize()
        assert after.launches == before.launches + 50
        assert after.event_records == before.event_records
    comm.barrier()


@pytest.mark.ranks(3, world="threads")
def test_calls_follow_one_another_from_stream_to_stream(comm):
    connected(comm)
    x = emulated.array(np.full(3000, 1.0))
    gate = Gate()
    first, second = emulated.Stream(), emulated.Stream()
    gate.hold(first)
    with first:
        comm.all_reduce(x)
    with second:
        comm.all_reduce(x)  # waits for the first
        work = comm.all_reduce(x, async_op=True)  # on a stream of its own, after the second
    with first:
        work.wait()
        first.add(lambda: np.add(x, 1, out=x))
    assert_same(x, np.full(3000, 1.0))
    gate.open()
    first.synchronize()
    assert_same(x, np.full(3000, comm.size**3 + 1.0))
    comm.barrier()


@pytest.mark.ranks(2, world="threads")
def test_an_async_call_does_not_wait_for_later_work_of_the_program(comm):
    connected(comm)
    x, gate = emulated.array(np.full(100, 1.0)), Gate()
    current = emulated.device.stream()
    work = comm.all_reduce(x, async_op=True)
    gate.hold(current)  # the program's own work, after the call in its program
    work.synchronize()  # … and not before it on its stream
    assert_same(x, np.full(100, float(comm.size)))
    gate.open()
    synchronize()
    comm.barrier()


@pytest.mark.ranks(2, world="threads")
def test_the_stream_of_a_call_may_be_dropped_at_once(comm):
    connected(comm)
    x, warm, gate = emulated.array(np.full(3000, 1.0)), emulated.array(np.ones(3000)), Gate()
    comm.all_reduce(warm)  # loads the kernel for this size: the calls that follow take the fast path
    synchronize()
    with emulated.Stream() as stream:
        gate.hold(stream)
        comm.all_reduce(x)
    del stream
    gc.collect()
    late = threading.Timer(PROMPT, gate.open)
    late.start()
    comm.all_reduce(x)  # on another one: it waits for the first, whose stream is still there, and the host does not
    assert not gate.opened()
    late.cancel()
    gate.open()
    synchronize()
    assert_same(x, np.full(3000, float(comm.size**2)))
    comm.barrier()


@pytest.mark.ranks(2, world="threads")
def test_a_program_that_is_far_ahead_waits(comm):
    connected(comm)
    x, gate = emulated.array(np.full(8, 1.0)), Gate()
    counts = [1, 2]
    gate.hold(emulated.device.stream())
    results = [comm.all_gather(x[: counts[comm.rank]], counts=counts)]
    opened = threading.Timer(SHORT, gate.open)
    opened.start()
    for _ in range(600):  # more than may be in flight: the caller waits for the gate
        results.append(comm.all_gather(x[: counts[comm.rank]], counts=counts))
    assert gate.opened()
    synchronize()
    for result in results:
        assert_same(result, np.ones(3))
    comm.barrier()


@pytest.mark.ranks(2, world="processes")
def test_loads_that_wait_for_kernels_do_not_wait_for_each_other(comm):
    """Load kernels while others are in flight; a load waits for these, as it may on a GPU."""
    groups, x = [comm.split(0) for _ in range(2)], emulated.array(np.full(5, 1.0))
    image, blocking = emulated.EmulatedDevice._image, emulated.EmulatedDevice.blocking

    def waits(device, variant):
        for each in groups:
            each.synchronize()
        return image(device, variant)

    try:
        emulated.EmulatedDevice.blocking = False
        for each in groups:
            each.all_reduce(x)  # connects
        emulated.EmulatedDevice._image = waits
        for each, op in zip(groups * 2, ("sum", "max", "min", "prod"), strict=True):
            if comm.rank == 1:
                time.sleep(0.05)  # the kernel of rank 0 is in flight meanwhile
            each.all_reduce(x, op)
        for each in groups:
            each.synchronize()
    finally:
        emulated.EmulatedDevice._image, emulated.EmulatedDevice.blocking = image, blocking
    assert_same(x, np.full(5, float(comm.size**3) ** comm.size))
    for each in groups:
        each.close()


@pytest.mark.ranks(3, world="threads")
def test_a_mismatch_after_a_wait_is_raised_by_a_later_call(comm):
    connected(comm)
    x, gate = emulated.array(np.ones(5)), Gate()
    with emulated.Stream() as stream:
        gate.hold(stream)
        work = comm.all_reduce(x, "max" if comm.rank else "min", async_op=True)
        work.wait()  # makes the stream wait, before the kernel has run
    gate.open()
    with pytest.raises(MismatchError, match=r"all_reduce.float64 x 5, max."):
        comm.synchronize()
    assert comm.all_reduce(x) is x
    comm.synchronize()
    assert_same(x, np.full(5, float(comm.size)))


class PerThread:
    """CUDA's default stream of each thread, as CuPy can use it."""

    ptr = 2
    add = emulated.Stream.add


@pytest.mark.ranks(2, world="threads")
def test_the_default_streams_of_two_threads_are_two_streams(comm):
    connected(comm)
    x, gate, late = emulated.array(np.ones(5)), Gate(), threading.Event()

    def call(held):
        emulated._current.streams.append(PerThread())
        if held:
            gate.hold(PerThread())
        comm.all_reduce(x)

    for held in (True, False):
        thread = threading.Thread(target=call, args=(held,))
        thread.start()
        thread.join()
    late.wait(SHORT)
    assert_same(x, np.ones(5))  # the second call waits for the first, which is on another stream of the same number
    gate.open()
    comm.synchronize()
    assert_same(x, np.full(5, float(comm.size**2)))
    comm.barrier()


def ahead_of_the_dead(comm):
    emulated.EmulatedDevice.blocking = False
    x = emulated.array(np.ones(5))
    comm.all_reduce(x)
    comm.synchronize()
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    for _ in range(2000):  # far more than may be in flight
        comm.all_reduce(x)


def test_a_rank_that_waits_for_room_notices_a_lost_peer():
    with pytest.raises(PeerLost, match="rank 1"):
        ringcomm.launch(ahead_of_the_dead, 2, world="processes", timeout=harness.OPERATION)


@pytest.mark.ranks(2, world="threads")
def test_a_communicator_may_be_closed_while_another_thread_calls(comm):
    x = emulated.array(np.ones(5000))
    comm.all_reduce(x)

    errors = []

    def call():
        try:
            while True:
                comm.all_reduce(x)
        except RingcommError as error:
            errors.append(str(error))

    calling = threading.Thread(target=call)
    calling.start()
    comm.synchronize()
    with suppress(PeerLost):  # the other thread may have launched a call that the peer's did not make any more
        comm.close()
    calling.join()
    (error,) = errors
    assert "closed" in error
