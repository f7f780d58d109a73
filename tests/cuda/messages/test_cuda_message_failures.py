"""Messages of arrays on GPUs, on the emulated device: failures and ends."""

import os
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import harness
from cases.gpu_messages import ALL, SLOT, device_array, values
from cases.on_device import Gate, synchronize
from cases.reference import assert_same
from harness.failures import survivors_of, until_broken
from ringcomm import Aborted, CollectiveTimeout, Communicator, PeerLost, RingcommError
from ringcomm.devices import emulated
from ringcomm.testing import connect_threads, run_threads
from ringcomm.transports import shm
from ringcomm.transports.cuda import messages

SHORT = 0.3  # seconds, of a wait that times out

as_on_a_gpu = pytest.mark.usefixtures("streams_as_on_a_gpu")


@as_on_a_gpu
@pytest.mark.ranks(2, world="threads")
def test_a_receiver_that_does_not_come_is_named(comm):
    x = device_array(2 * SLOT, 0)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 0.3 s for send"):
            comm.send(x, 1, timeout=SHORT)
    else:
        until_broken(comm)


@as_on_a_gpu
@pytest.mark.ranks(2, world="threads")
def test_a_sender_whose_stream_is_stuck_is_named(comm):
    x = device_array(10, 0)
    if comm.rank == 0:
        with emulated.Stream() as stream:
            gate = Gate()
            gate.hold(stream)
            comm.send(x, 1)
        until_broken(comm)
        gate.open()
    else:
        receive = comm.recv(x, 0, timeout=SHORT, async_op=True)
        receive.wait()
        error = until_broken(comm)
        assert isinstance(error, CollectiveTimeout)
        assert "rank 0 has not reached the send on its stream" in str(error)


@as_on_a_gpu
@pytest.mark.ranks(2, world="threads")
def test_a_receive_that_waits_for_a_chunk_is_named(comm):
    """A receive is named, too, if it is not its last launch that fails."""
    x = device_array(3 * ALL, 0)
    if comm.rank == 0:
        gate = Gate()
        try:
            with emulated.Stream() as stream:
                gate.hold(stream)
                comm.send(x, 1, async_op=True)
            until_broken(comm)
        finally:
            gate.open()
    else:
        with pytest.raises(CollectiveTimeout, match=rf"rank 1 waited 0.3 s for recv\(uint8 x {x.size}, from 0\)"):
            comm.recv(x, 0, timeout=SHORT, async_op=True).synchronize()


@as_on_a_gpu
@pytest.mark.ranks(2, world="threads")
def test_an_abort_ends_a_receive(comm):
    x = device_array(1, 0)
    if comm.rank == 0:
        comm.recv(x, 1)
        comm.abort("enough")
        return
    comm.send(x, 0)
    with pytest.raises(Aborted, match="enough"):
        comm.recv(emulated.empty(1, np.uint8), 0)


def closed(comm):
    """What was sent before a rank closes is received all the same."""
    comm = comm.split(0)
    x = device_array(SLOT, 1)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        time.sleep(SHORT)
        comm.recv(out := emulated.empty(SLOT, np.uint8), 0)
        synchronize()
        assert_same(out, values(SLOT, 1))
    comm.close()


@as_on_a_gpu
def test_a_sender_may_close_before_its_message_is_received(world):
    harness.run(closed, 2, world=world)


@as_on_a_gpu
@pytest.mark.ranks(2)
def test_a_communicator_closes_with_messages_in_flight(comm):
    comm = comm.split(0)
    x = device_array(100, 0)
    if comm.rank == 0:
        for tag in range(3):
            comm.send(x, 1, tag)
        work = comm.recv(emulated.empty(5, np.uint8), 1, async_op=True)
    comm.barrier()
    with suppress(PeerLost):  # rank 1 may have closed a moment before, which ends the receive
        comm.close()
    if comm.rank == 0:
        with pytest.raises(RingcommError):
            work.wait()


def received_before_the_close(comm, gate, closed):
    """Rank 1 closes while the stream of rank 0 has not reached its send."""
    group = comm.split(0)
    x = device_array(100, 7 if comm.rank == 0 else 1)
    if comm.rank == 0:
        with emulated.Stream() as stream:
            gate.hold(stream)
            group.send(x, 1)
        assert closed.wait(harness.OPERATION)
        gate.open()
    else:
        group.recv(x, 0)
        group.close()
        closed.set()
        assert_same(x, values(100, 7))
    group.close()


@as_on_a_gpu
def test_close_waits_for_a_message_that_a_receive_has_returned(monkeypatch):
    finish, gate = messages.GpuMessages.finish, Gate()

    def finished(self):
        if self._cpu.rank == 1:
            gate.open()
        finish(self)

    monkeypatch.setattr(messages.GpuMessages, "finish", finished)
    harness.run(received_before_the_close, 2, gate, threading.Event(), world="threads")


def lost_in_the_close(comm, closed):
    group, gate = comm.split(0), Gate()
    x = device_array(100, comm.rank)
    if comm.rank == 0:
        with emulated.Stream() as stream:
            gate.hold(stream)
            group.send(x, 1)
        assert closed.wait(harness.OPERATION)
        gate.open()
        group.close()  # the failure is not its own
    else:
        group.recv(x, 0, timeout=SHORT)
        try:
            with pytest.raises(CollectiveTimeout, match=r"rank 1 waited 0.3 s for recv\(uint8 x 100, from 0\)"):
                group.close()
        finally:
            closed.set()
        group.close()


@as_on_a_gpu
def test_close_raises_what_a_message_has_failed_for():
    harness.run(lost_in_the_close, 2, threading.Event(), world="threads")


def read_after_the_close(comm, launched, closed):
    """Rank 0 closes while the stream of rank 1 has not come to its receive."""
    x, gate = device_array(100, 7 if comm.rank == 0 else 1), Gate()
    if comm.rank == 0:
        comm.send(x, 1)
        synchronize()
        assert launched.wait(harness.OPERATION)
        comm.close()
        closed.set()
        return
    with emulated.Stream() as stream:
        gate.hold(stream)
        comm.recv(x, 0)
    launched.set()
    assert closed.wait(harness.OPERATION)
    gate.open()
    stream.synchronize()
    assert_same(x, values(100, 7))


@as_on_a_gpu
def test_a_rank_of_this_process_that_closes_keeps_memory_that_its_peer_reads(monkeypatch):
    monkeypatch.setattr(messages, "CLOSE_TIMEOUT", SHORT)
    launched, closed = threading.Event(), threading.Event()
    ends = connect_threads(shm.connect, 2)
    run_threads(lambda comm: read_after_the_close(comm, launched, closed), [Communicator(end) for end in ends])


@pytest.mark.ranks(2, world="processes")
def test_the_next_communicator_uses_an_arena_that_peers_may_have_mapped(comm):
    """A peer may have the arena of a closed communicator mapped: it is not freed, and the next one uses it."""
    arenas = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_spare", spare := {})
        for turn in range(3):
            with comm.split(0) as group:
                for tag in range(20):
                    x, out = device_array(SLOT, turn + tag + comm.rank), emulated.empty(SLOT, np.uint8)
                    group.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank, tag=tag)
                    assert_same(out, values(SLOT, turn + tag + 1 - comm.rank))
                arenas.append(group._router._gpu_messages._arena)
            assert [*spare.values()] == [arenas[-1:]]
        assert all(arena is arenas[0] for arena in arenas)
    comm.barrier()


def lost_sender(comm):
    """Rank 0 dies with its send behind a step that does not end."""
    emulated.EmulatedDevice.blocking = False
    x = device_array(10, 0)
    if comm.rank == 0:
        comm.recv(np.empty(1), 1)
        with emulated.Stream() as stream:
            stream.add(lambda: time.sleep(60))
            comm.send(x, 1)
        comm.send(np.empty(1), 1, tag=1)
        comm.recv(np.empty(1), 1, tag=2)
        os._exit(1)
    comm.send(np.empty(1), 0)
    comm.recv(np.empty(1), 0, tag=1)
    work = comm.recv(x, 0, async_op=True)
    work.wait()
    comm.send(np.empty(1), 0, tag=2)
    error = until_broken(comm)
    assert isinstance(error, PeerLost)
    assert error.rank == 0
    return True


def test_a_sender_that_dies_is_named():
    assert survivors_of(lost_sender, 2)[0] == {1: True}


@pytest.mark.ranks(2)
def test_host_memory_receives_from_a_rank_that_makes_no_calls(comm):
    x, out = device_array(100, 5), np.empty(100, np.uint8)
    if comm.rank == 0:
        comm.send(x, 1)
        return
    time.sleep(SHORT)
    comm.recv(out, 0, timeout=5.0)
    assert_same(out, values(100, 5))


def staged_and_buffered(comm, sent):
    """Sends in slots on the GPU take no host memory: as many small ones are buffered as without them."""
    x, filler = emulated.empty(1 << 20, np.uint8), np.zeros(4096, np.uint8)
    if comm.rank == 0:
        for tag in range(20):
            comm.send(x, 1, tag=1000 + tag)
        for tag in range(1000):
            comm.send(filler, 1, tag, timeout=5.0)
        for tag in range(20):
            comm.send(x, 1, tag=2000 + tag)
        comm.send(filler, 1, tag=3000, timeout=5.0)
        synchronize()
        sent.set()
        return
    assert sent.wait(harness.OPERATION)
    for tag in (*range(1000), 3000):
        comm.recv(filler, 0, tag)
    for tag in range(20):
        comm.recv(x, 0, tag=1000 + tag)
        comm.recv(x, 0, tag=2000 + tag)
    synchronize()


@as_on_a_gpu
def test_messages_in_slots_are_not_charged_as_host_memory(monkeypatch):
    shape = emulated.device.message_shape._replace(piece_bytes=1 << 20, slots=64, slot_bytes=1 << 20)
    monkeypatch.setattr(emulated.EmulatedDevice, "message_shape", shape)
    harness.run(staged_and_buffered, 2, threading.Event(), world="threads")
