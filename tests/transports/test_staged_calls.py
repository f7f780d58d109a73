"""Collectives of GPUs between hosts, on the emulated device: order among streams and calls."""

import threading

import numpy as np
import pytest

import harness
from cases.between_hosts import on_layouts
from cases.on_device import Gate
from cases.reference import assert_same
from ringcomm.devices import emulated

as_on_a_gpu = pytest.mark.usefixtures("streams_as_on_a_gpu")
pytestmark = pytest.mark.usefixtures("small_chunks")
SHORT = 0.2  # seconds in which nothing must happen


@as_on_a_gpu
@on_layouts("01", "0011")
def test_an_asynchronous_call_does_not_block_the_host(comm):
    x, gate = emulated.array(np.zeros(1000)), Gate()
    late = threading.Timer(harness.OPERATION / 4, gate.open)  # so that a call that blocks ends
    late.start()
    with emulated.Stream() as stream:
        gate.hold(stream)
        stream.add(lambda: x.fill(comm.rank + 1))
        works = [comm.all_reduce(x, async_op=True), comm.all_gather(x[:5], async_op=True)]
        assert not gate.opened()
        assert not any(work.done() for work in works)
        gate.open()
        _, rows = (work.wait() for work in works)
    late.cancel()
    total = sum(range(1, comm.size + 1))
    assert_same(x, np.full(1000, float(total)))
    assert_same(rows, np.full((comm.size, 5), float(total)))


@as_on_a_gpu
@on_layouts("01", "0011")
def test_a_result_does_not_overtake_what_the_program_reads(comm):
    """Scatter into an array that the program reads before; nothing of it is given by this rank."""
    out, seen, gate, called = emulated.array(np.full(1000, -1.0)), [], Gate(), threading.Event()
    x = emulated.array(np.arange(1000.0 * comm.size)) if comm.rank == 0 else None
    with emulated.Stream() as stream:
        if comm.rank:
            gate.hold(stream)
        stream.add(lambda: seen.append(out.copy()))
        work = comm.scatter(x, out=out, async_op=True)
        work.add_done_callback(lambda _: called.set())
        if comm.rank:
            assert not called.wait(SHORT)
        gate.open()
        work.wait()
        stream.synchronize()
    assert_same(seen[0], np.full(1000, -1.0))
    assert_same(out, np.arange(1000.0) + 1000 * comm.rank)


@as_on_a_gpu
@on_layouts("01", "0011")
def test_no_call_overtakes_a_queued_one(comm):
    """Queue a call of a GPU behind a gate, on one rank only, and make others that must not overtake it."""
    total = float(sum(range(1, comm.size + 1)))
    for number in range(3):
        x, host, gate = emulated.array(np.full(500, comm.rank + 1.0)), np.full(500, comm.rank + 1.0), Gate()
        with emulated.Stream() as stream:
            if comm.rank == 1:
                gate.hold(stream)
            work = comm.all_reduce(x, async_op=True)
            threading.Timer(SHORT, gate.open).start()
            if number == 0:
                rows = comm.all_gather(host)
                assert_same(rows, np.repeat(np.arange(1.0, comm.size + 1), 500).reshape(comm.size, 500))
            elif number == 1:
                queued = comm.all_reduce(host, async_op=True)
                comm.barrier()
                assert queued.done()
                assert_same(host, np.full(500, total))
            else:
                assert comm.all_gather_object(comm.rank) == [*range(comm.size)]
                with comm.split(0) as group:
                    assert_same(group.all_reduce(host), np.full(500, total))
            assert work.done()
            assert_same(work.wait(), np.full(500, total))


@on_layouts("0011")
def test_a_callback_may_wait_for_another_call(comm):
    x, order, ended = emulated.array(np.ones(500)), [], threading.Event()

    def first(_):
        order.append(float(comm.all_reduce(x, async_op=True).wait()[0]))
        ended.set()

    comm.all_reduce(x, async_op=True).add_done_callback(first)
    assert ended.wait(harness.OPERATION)
    assert order == [float(comm.size**2)]
