"""Messages of arrays on GPUs, on the emulated device: order among streams, batches, captures."""

import threading
import weakref

import numpy as np
import pytest

import harness
from cases.gpu_messages import SLOT, device_array, values
from cases.on_device import Gate, synchronize
from cases.reference import assert_same
from harness.failures import until_broken
from ringcomm import ArgumentError, RingcommError
from ringcomm.devices import emulated
from ringcomm.native import ffi, lib
from ringcomm.transports.cuda import messages

pytestmark = pytest.mark.usefixtures("streams_as_on_a_gpu")

SHORT = 0.3  # seconds until a gate opens
SLOTS = emulated.device.message_shape.slots


@pytest.mark.ranks(2, world="threads")
def test_streams_order_messages(comm):
    """A send reads its array when its stream comes to it, and a receive writes when the array is free."""
    gate, stream = Gate(), emulated.Stream()
    x = device_array(SLOT * 3 if comm.rank == 0 else 100, 0)
    comm.sendrecv(device_array(1, 0), 1 - comm.rank, emulated.empty(1, np.uint8), 1 - comm.rank)
    gate.hold(stream)
    stream.add(lambda: x.fill(7))
    with stream:
        send = comm.send(x, 1 - comm.rank, async_op=True)
    out = emulated.empty(100 if comm.rank == 0 else SLOT * 3, np.uint8)
    out.fill(1)
    receive = comm.recv(out, 1 - comm.rank, async_op=True)
    with emulated.Stream() as other:
        receive.wait()
        results = []
        other.add(lambda: results.append(out.copy()))
    send.wait()
    assert not receive.done()
    assert not results
    comm.sendrecv(np.empty(1), 1 - comm.rank, np.empty(1), 1 - comm.rank, tag=1)  # both have looked
    gate.open()
    other.synchronize()
    receive.synchronize(), send.synchronize()
    assert_same(results[0], np.full(out.size, 7, np.uint8))


@pytest.mark.ranks(2, world="threads")
def test_a_barrier_waits_for_messages(comm):
    other, gate = 1 - comm.rank, Gate()
    x, out = device_array(10, comm.rank), emulated.empty(10, np.uint8)
    with emulated.Stream() as stream:
        gate.hold(stream)
        comm.send(x, other)
    comm.recv(out, other)
    threading.Timer(SHORT, gate.open).start()
    comm.barrier()
    assert_same(out, values(10, other))


@pytest.mark.ranks(2, world="threads")
def test_sends_do_not_hold_up_a_collective_behind_them(comm):
    """Sends before a collective on their stream, whose receives come behind it: more of them than there are slots."""
    other, total = 1 - comm.rank, emulated.array(np.ones(3))
    comm.all_reduce(total)  # connects
    arrays = [device_array(100, tag if comm.rank == 0 else 99) for tag in range(3 * SLOTS)]
    if comm.rank == 0:
        sends = [comm.send(x, other, tag, async_op=True) for tag, x in enumerate(arrays[:SLOTS])]
        comm.sendrecv(np.empty(1), other, np.empty(1), other, 1000)  # now they are received, and their slots free
        sends += [comm.send(x, other, SLOTS + tag, async_op=True) for tag, x in enumerate(arrays[SLOTS:])]
        comm.all_reduce(total, timeout=5.0)
        works = sends
    else:
        comm.all_reduce(total, timeout=5.0)
        comm.recv(np.empty(1), other, 1000)
        works = [comm.recv(x, other, tag, async_op=True) for tag, x in enumerate(arrays)]
        comm.send(np.empty(1), other, 1000)
    for work in works:
        work.synchronize()
    synchronize()
    for tag, x in enumerate(arrays):
        assert_same(x, values(100, tag))
    assert_same(total, np.full(3, 4.0))


@pytest.mark.ranks(2, world="threads")
def test_a_blocking_send_uses_slots_again(comm):
    """Both ranks send before they receive, again and again: a slot that has been read takes the next message."""
    other, out = 1 - comm.rank, emulated.empty(100, np.uint8)
    for turn in range(3 * SLOTS):
        x = device_array(100, turn + comm.rank)
        comm.send(x, other, timeout=5.0)
        comm.recv(out, other)
        synchronize()
        assert_same(out, values(100, turn + other))


def launches(comm):
    """Return how many launches of messages of this rank have ended."""
    completed = ffi.cast("uint64_t *", comm._router._gpu_messages._completed.address)
    return max(completed[0 : lib.RC_MAX_LAUNCHES])


@pytest.mark.ranks(4, world="threads")
def test_a_batch_is_one_launch_each_way(comm):
    """A batch is one launch for the sends, and one for the receives that are matched when it ends."""
    router, others = comm._router, [rank for rank in range(comm.size) if rank != comm.rank]
    arrays = {rank: device_array(500, 10 * comm.rank + rank) for rank in others}
    results = {rank: emulated.empty(500, np.uint8) for rank in others}
    for rank in others:
        comm.send(arrays[rank], rank)
    for rank in others:
        comm.recv(results[rank], rank)
    comm.barrier()
    synchronize()
    before = launches(comm)
    router.coalesce_messages(True)
    sends = [comm.send(arrays[rank], rank, async_op=True) for rank in others]
    router.coalesce_messages(False)
    comm.barrier()
    for out in results.values():
        out.fill(0)
    router.coalesce_messages(True)
    receives = [comm.recv(results[rank], rank, async_op=True) for rank in others]
    router.coalesce_messages(False)
    for work in sends + receives:
        work.synchronize()
    for rank in others:
        assert_same(results[rank], values(500, 10 * rank + comm.rank))
    assert launches(comm) == before + 2


@pytest.mark.ranks(2, world="threads")
def test_the_first_batch_is_one_launch(comm):
    other, out = 1 - comm.rank, [emulated.empty(500, np.uint8) for _ in range(3)]
    comm._router.coalesce_messages(True)
    works = [comm.send(device_array(500, tag), other, tag, async_op=True) for tag in range(3)]
    comm._router.coalesce_messages(False)
    for work in works:
        work.synchronize()
    assert launches(comm) == 1
    for tag in range(3):
        comm.recv(out[tag], other, tag)
    synchronize()
    for tag in range(3):
        assert_same(out[tag], values(500, tag))


def failed_batch(comm):
    if comm.rank == 1:
        until_broken(comm)
        return
    comm._router.coalesce_messages(True)
    works = [comm.send(device_array(10, tag), 1, tag, async_op=True) for tag in range(2)]
    with pytest.raises(RingcommError, match="cuLaunchKernel"):
        comm._router.coalesce_messages(False)
    for work in works:
        with pytest.raises(RingcommError, match="cuLaunchKernel"):
            work.synchronize()


def test_a_batch_that_is_not_launched_breaks_the_communicator(monkeypatch):
    monkeypatch.setattr(emulated.EmulatedDevice, "message_kernel", lambda _: 1)
    harness.run(failed_batch, 2, world="threads")


@pytest.mark.ranks(2, world="threads")
def test_a_message_cannot_be_captured(comm):
    stream = emulated.Stream()
    with stream, emulated.capture(stream), pytest.raises(ArgumentError, match="CUDA graph"):
        comm.send(device_array(1, 0), 1 - comm.rank)


@pytest.mark.ranks(1, world="threads")
def test_synchronize_keeps_a_dropped_array_until_its_message_has_moved(comm):
    """`synchronize` keeps an array that the program has dropped until the message has moved, and not until `wait`."""
    finish, alive = messages.PendingMessage.finish, []
    for start in (
        lambda x, out: (comm.send(x, 0, async_op=True), comm.recv(out, 0, async_op=True)),
        lambda x, out: (comm.sendrecv(x, 0, out, 0, async_op=True),),
    ):
        gate, out = Gate(), emulated.empty(100, np.uint8)
        with emulated.Stream() as stream, pytest.MonkeyPatch.context() as patch:
            gate.hold(stream)
            works = start(x := device_array(100, 1), out)
            source = weakref.ref(x)
            del x

            def finished(*call, source=source, gate=gate):
                if not gate.opened():  # later the message may have moved, and the array is free
                    alive.append(source() is not None)
                    gate.open()
                return finish(*call)

            patch.setattr(messages.PendingMessage, "finish", finished)
            for work in works:
                work.synchronize()
        assert_same(out, values(100, 1))
    assert alive == [True, True]
