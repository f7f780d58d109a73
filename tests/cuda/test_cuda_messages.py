"""Messages of arrays on GPUs, on the emulated device: matching, order, streams, host memory at one end, failures."""

import os
import random
import threading
import time

import numpy as np
import pytest

import harness
from failures import mortals, outcomes, until_broken
from on_device import Gate
from reference import assert_same
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MismatchError, PeerLost, RingcommError
from ringcomm.devices import emulated
from ringcomm.native import ffi, lib
from ringcomm.transports import routing
from ringcomm.transports.cuda import messages

BLOCK = emulated.device.message_shape.block_bytes
ALL = BLOCK * emulated.device.message_shape.blocks
SIZES = (0, 1, 300, BLOCK - 1, BLOCK, BLOCK + 1, 2 * ALL + 5)  # bytes
SHORT = 0.3  # seconds, of a wait that times out

as_on_a_gpu = pytest.mark.usefixtures("streams_as_on_a_gpu")


def values(size, seed):
    return ((np.arange(size) * 7 + 31 * seed) % 251).astype(np.uint8)


def device_array(size, seed):
    return emulated.array(values(size, seed))


def synchronize():
    emulated.device.stream().synchronize()


def no_host_memory(*_):
    raise AssertionError("a message goes through host memory")


def every_call(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for size in SIZES:
        mine, expected = device_array(size, comm.rank), values(size, left)
        out = emulated.empty(size, np.uint8)
        if comm.rank % 2:
            assert comm.recv(out, left) == left
            comm.send(mine, right)
        else:
            comm.send(mine, right)
            assert comm.recv(out, left) == left
        synchronize()
        assert_same(out, expected, f"send and recv of {size} bytes")
        out = emulated.empty(size, np.uint8)
        assert comm.sendrecv(mine, right, out, None) == left
        synchronize()
        assert_same(out, expected, f"sendrecv of {size} bytes")
        out = device_array(size + 3, 9)
        receive = comm.recv(out, left, tag=5, at_most=True, async_op=True)
        send = comm.send(mine, right, tag=5, async_op=True)
        send.wait()
        assert receive.wait() == left
        for work in (receive, send):
            work.synchronize()
            assert work.done()
        assert_same(out, np.concatenate([expected, values(size + 3, 9)[size:]]), f"at most {size} bytes")


@as_on_a_gpu
@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_threads_stay_on_the_gpu(size, monkeypatch):
    monkeypatch.setattr(routing, "_downloaded", no_host_memory)
    harness.run(every_call, size, world="threads")


def only_on_the_gpu(comm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_downloaded", no_host_memory)
        every_call(comm)


def test_messages_of_processes_stay_on_the_gpu():
    harness.run(only_on_the_gpu, 2, world="processes")


def test_blocking_calls_of_threads(world):
    harness.run(every_call, 2, world=world)


def mixed(comm):
    """A message between the GPU and host memory, in each direction, with the receive before and after the send."""
    other = 1 - comm.rank
    for size in (0, 1, BLOCK, 3_000_000):
        for posted_before in (True, False):
            for sender_on_gpu in (True, False):
                array = device_array if sender_on_gpu else values
                x = array(size, 3)
                if comm.rank == 0:
                    if posted_before:
                        comm.recv(np.empty(1, np.uint8), other, tag=1)
                    work = comm.send(x, other, async_op=True)
                    if not posted_before:
                        comm.send(np.empty(1, np.uint8), other, tag=1)
                    work.synchronize()
                    continue
                out = np.empty(size, np.uint8) if sender_on_gpu else emulated.empty(size, np.uint8)
                if posted_before:
                    work = comm.recv(out, None, async_op=True)
                    comm.send(np.empty(1, np.uint8), other, tag=1)
                    assert work.wait() == other
                else:
                    comm.recv(np.empty(1, np.uint8), other, tag=1)
                    assert comm.recv(out, None) == other
                synchronize()
                assert_same(out, values(size, 3), f"{size} bytes, {posted_before}, {sender_on_gpu}")
    comm.barrier()


@as_on_a_gpu
def test_either_end_may_be_in_host_memory(world):
    harness.run(mixed, 2, world=world)


def to_itself(comm):
    for size in (0, 1, 5 * ALL):
        for here, there in ((device_array, emulated.empty), (device_array, np.empty), (values, emulated.empty)):
            x, out = here(size, 4), there(size, np.uint8)
            comm.send(x, comm.rank)
            assert comm.recv(out, None) == comm.rank
            synchronize()
            assert_same(out, values(size, 4), f"{size} bytes")
            out = there(size, np.uint8)
            assert comm.sendrecv(x, comm.rank, out, comm.rank) == comm.rank
            synchronize()
            assert_same(out, values(size, 4), f"sendrecv of {size} bytes")


@as_on_a_gpu
def test_a_rank_sends_to_itself():
    harness.run(to_itself, 1, world="threads")


def out_of_order(comm):
    """More than the blocks hold, received in the opposite order."""
    count, size, other = 40, BLOCK - 8, 1 - comm.rank
    sends = [comm.send(device_array(size, tag), other, tag, async_op=True) for tag in range(count)]
    for tag in reversed(range(count)):
        out = emulated.empty(size, np.uint8)
        comm.recv(out, other, tag)
        synchronize()
        assert_same(out, values(size, tag), f"tag {tag}")
    for send in sends:
        send.synchronize()


@as_on_a_gpu
def test_messages_out_of_order_do_not_block(world):
    harness.run(out_of_order, 2, world=world)


def all_to_all(comm):
    for size in (100, 2 * BLOCK, ALL + 1):
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        arrays = {rank: emulated.empty(size, np.uint8) for rank in others}
        sent = {rank: device_array(size, 10 * comm.rank + rank) for rank in others}
        works = [comm.recv(arrays[rank], rank, async_op=True) for rank in others]
        works += [comm.send(sent[rank], rank, async_op=True) for rank in others]
        for work in works:
            work.wait()
        synchronize()
        for rank in others:
            assert_same(arrays[rank], values(size, 10 * rank + comm.rank), f"{size} bytes from rank {rank}")


@as_on_a_gpu
def test_all_to_all_of_five_ranks(world):
    harness.run(all_to_all, 5, world=world)


def at_random(comm, seed):
    """The same messages on all ranks, in an order of each; their places, sizes and calls are random."""
    common, own = random.Random(seed), random.Random(seed + 100 * comm.rank)
    messages = [
        (common.randrange(comm.size), common.randrange(comm.size), tag, common.choice((0, 1, 77, BLOCK, 3 * BLOCK + 1)))
        for tag in range(40)
    ]
    mine = [each for each in messages if comm.rank in each[:2]]
    own.shuffle(mine)
    works, sent, received = [], [], []
    for source, dest, tag, size in mine:
        on_gpu = own.random() < 0.7
        if source == comm.rank:
            sent.append((device_array if on_gpu else values)(size, tag))
            works.append(comm.send(sent[-1], dest, tag, async_op=True))
        if dest == comm.rank:
            out = (emulated.empty if on_gpu else np.empty)(size, np.uint8)
            peer = own.choice((source, None))
            works.append(comm.recv(out, peer, tag, at_most=own.random() < 0.3, async_op=True))
            received.append((out, size, tag))
    own.shuffle(works)
    for work in works:
        work.synchronize()
    for out, size, tag in received:
        assert_same(out, values(size, tag), f"tag {tag}, {size} bytes")


@as_on_a_gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_messages(seed):
    harness.run(at_random, 3, seed, world="threads" if seed % 2 else "processes")


def in_the_order_of_streams(comm):
    """A send reads its array when its stream comes to it, and a receive writes when the array is free."""
    gate, stream = Gate(), emulated.Stream()
    x = device_array(BLOCK * 3 if comm.rank == 0 else 100, 0)
    comm.sendrecv(device_array(1, 0), 1 - comm.rank, emulated.empty(1, np.uint8), 1 - comm.rank)
    gate.hold(stream)
    stream.add(lambda: x.fill(7))
    with stream:
        send = comm.send(x, 1 - comm.rank, async_op=True)
    out = emulated.empty(100 if comm.rank == 0 else BLOCK * 3, np.uint8)
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


@as_on_a_gpu
def test_streams_order_messages():
    harness.run(in_the_order_of_streams, 2, world="threads")


def refused_own(comm):
    """The copy of a message that its receive has refused writes into the memory of no later one."""
    gate, late, stream, refused = Gate(), emulated.Stream(), emulated.Stream(), device_array(100, 1)
    with late:
        gate.hold(late)
        comm.send(refused, 0)
    with pytest.raises(MismatchError):
        comm.recv(emulated.empty(50, np.uint8), 0)
    with stream:
        comm.send(device_array(100, 2), 0)
        synchronize()
        gate.open()
        late.synchronize()
        comm.recv(out := emulated.empty(100, np.uint8), 0)
        synchronize()
    assert_same(out, values(100, 2))


@as_on_a_gpu
def test_a_refused_message_of_a_rank_to_itself_keeps_its_memory():
    harness.run(refused_own, 1, world="threads")


def wrong_size(comm):
    x, large = device_array(10, 0), device_array(2 * BLOCK, 0)
    if comm.rank == 0:
        comm.send(x, 1)
        with pytest.raises(MismatchError):
            comm.send(large, 1, tag=1)
        comm.send(x, 1, tag=2)
    else:
        with pytest.raises(MismatchError, match="rank 0 sent uint8 x 10"):
            comm.recv(emulated.empty(11, np.uint8), 0)
        with pytest.raises(MismatchError):
            comm.recv(emulated.empty(11, np.uint8), 0, tag=1)
        out = emulated.empty(10, np.uint8)
        assert comm.recv(out, 0, tag=2) == 0
        synchronize()
        assert_same(out, values(10, 0))


@as_on_a_gpu
def test_a_message_of_another_size_is_a_mismatch(world):
    harness.run(wrong_size, 2, world=world)


def late_receiver(comm):
    x = device_array(2 * BLOCK, 0)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 0.3 s for send"):
            comm.send(x, 1, timeout=SHORT)
    else:
        until_broken(comm)


@as_on_a_gpu
def test_a_receiver_that_does_not_come_is_named():
    harness.run(late_receiver, 2, world="threads")


def stuck_stream(comm):
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
        assert "rank 0 has not come to the send on its stream" in str(error)


@as_on_a_gpu
def test_a_sender_whose_stream_is_stuck_is_named():
    harness.run(stuck_stream, 2, world="threads")


def aborted(comm):
    x = device_array(1, 0)
    if comm.rank == 0:
        comm.recv(x, 1)
        comm.abort("enough")
        return
    comm.send(x, 0)
    with pytest.raises(Aborted, match="enough"):
        comm.recv(emulated.empty(1, np.uint8), 0)


@as_on_a_gpu
def test_an_abort_ends_a_receive():
    harness.run(aborted, 2, world="threads")


def closed(comm):
    """What was sent before a rank closes is received all the same."""
    comm = comm.split(0)
    x = device_array(BLOCK, 1)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        time.sleep(SHORT)
        comm.recv(out := emulated.empty(BLOCK, np.uint8), 0)
        synchronize()
        assert_same(out, values(BLOCK, 1))
    comm.close()


@as_on_a_gpu
def test_a_sender_may_close_before_its_message_is_received(world):
    harness.run(closed, 2, world=world)


def not_received(comm):
    comm = comm.split(0)
    x = device_array(100, 0)
    if comm.rank == 0:
        for tag in range(3):
            comm.send(x, 1, tag)
        work = comm.recv(emulated.empty(5, np.uint8), 1, async_op=True)
    comm.barrier()
    comm.close()
    if comm.rank == 0:
        with pytest.raises(RingcommError):
            work.wait()


@as_on_a_gpu
def test_a_communicator_closes_with_messages_in_flight(world):
    harness.run(not_received, 2, world=world)


def next_communicator(comm):
    """A peer may have the arena of a closed communicator mapped: it is not freed, and the next one uses it."""
    arenas = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated.EmulatedDevice, "memory_outlives_owner", False)
        patch.setattr(messages, "_spare", spare := {})
        for turn in range(3):
            with comm.split(0) as group:
                for tag in range(20):
                    x, out = device_array(BLOCK, turn + tag + comm.rank), emulated.empty(BLOCK, np.uint8)
                    group.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank, tag=tag)
                    assert_same(out, values(BLOCK, turn + tag + 1 - comm.rank))
                arenas.append(group._transport._gpu_messages._arena)
            assert [*spare.values()] == [arenas[-1:]]
        assert all(arena is arenas[0] for arena in arenas)
    comm.barrier()


def test_the_next_communicator_uses_an_arena_that_peers_may_have_mapped():
    harness.run(next_communicator, 2, world="processes")


def captured(comm):
    stream = emulated.Stream()
    with stream, emulated.capture(stream), pytest.raises(ArgumentError, match="CUDA graph"):
        comm.send(device_array(1, 0), 1 - comm.rank)


@as_on_a_gpu
def test_a_message_cannot_be_captured():
    harness.run(captured, 2, world="threads")


def batches(comm):
    """A batch is one launch for the sends, and one for the receives that are matched when it ends."""
    transport, others = comm._transport, [rank for rank in range(comm.size) if rank != comm.rank]
    arrays = {rank: device_array(500, 10 * comm.rank + rank) for rank in others}
    results = {rank: emulated.empty(500, np.uint8) for rank in others}
    for rank in others:
        comm.send(arrays[rank], rank)
    for rank in others:
        comm.recv(results[rank], rank)
    comm.barrier()
    completed = ffi.cast("uint64_t *", transport._gpu_messages._completed.address)
    synchronize()
    before = max(completed[0 : lib.RC_GPU_LAUNCHES])
    transport.hold_messages(True)
    sends = [comm.send(arrays[rank], rank, async_op=True) for rank in others]
    transport.hold_messages(False)
    comm.barrier()
    for out in results.values():
        out.fill(0)
    transport.hold_messages(True)
    receives = [comm.recv(results[rank], rank, async_op=True) for rank in others]
    transport.hold_messages(False)
    for work in sends + receives:
        work.synchronize()
    for rank in others:
        assert_same(results[rank], values(500, 10 * rank + comm.rank))
    assert max(completed[0 : lib.RC_GPU_LAUNCHES]) == before + 2


@as_on_a_gpu
def test_a_batch_is_one_launch_each_way():
    harness.run(batches, 4, world="threads")


def first_batch(comm):
    other, out = 1 - comm.rank, [emulated.empty(500, np.uint8) for _ in range(3)]
    comm._transport.hold_messages(True)
    works = [comm.send(device_array(500, tag), other, tag, async_op=True) for tag in range(3)]
    comm._transport.hold_messages(False)
    for work in works:
        work.synchronize()
    completed = ffi.cast("uint64_t *", comm._transport._gpu_messages._completed.address)
    assert max(completed[0 : lib.RC_GPU_LAUNCHES]) == 1
    for tag in range(3):
        comm.recv(out[tag], other, tag)
    synchronize()
    for tag in range(3):
        assert_same(out[tag], values(500, tag))


@as_on_a_gpu
def test_the_first_batch_is_one_launch():
    harness.run(first_batch, 2, world="threads")


def failed_batch(comm):
    if comm.rank == 1:
        until_broken(comm)
        return
    comm._transport.hold_messages(True)
    works = [comm.send(device_array(10, tag), 1, tag, async_op=True) for tag in range(2)]
    with pytest.raises(RingcommError, match="cuLaunchKernel"):
        comm._transport.hold_messages(False)
    for work in works:
        with pytest.raises(RingcommError, match="cuLaunchKernel"):
            work.synchronize()


@as_on_a_gpu
def test_a_batch_that_is_not_launched_breaks_the_communicator(monkeypatch):
    monkeypatch.setattr(emulated.EmulatedDevice, "message_kernel", lambda _: 1)
    harness.run(failed_batch, 2, world="threads")


def after_a_barrier(comm):
    other, gate = 1 - comm.rank, Gate()
    x, out = device_array(10, comm.rank), emulated.empty(10, np.uint8)
    with emulated.Stream() as stream:
        gate.hold(stream)
        comm.send(x, other)
    comm.recv(out, other)
    threading.Timer(SHORT, gate.open).start()
    comm.barrier()
    assert_same(out, values(10, other))


@as_on_a_gpu
def test_a_barrier_waits_for_messages():
    harness.run(after_a_barrier, 2, world="threads")


def unreachable(comm):
    emulated.configure(unreachable=True)
    try:
        with comm.split(0) as group:
            for size in (0, 1, 3 * BLOCK):
                x, out = device_array(size, comm.rank), emulated.empty(size, np.uint8)
                group.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
                assert_same(out, values(size, 1 - comm.rank))
            comm.barrier()
    finally:
        emulated.configure()


def test_gpus_that_do_not_reach_each_other_use_host_memory():
    harness.run(unreachable, 2, world="processes")


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
    with mortals(2) as pool:
        results = {rank: result for rank, result, _ in outcomes(pool, lost_sender)}
    assert results[1] is True, results[1]


def idle_sender(comm):
    x, out = device_array(100, 5), np.empty(100, np.uint8)
    if comm.rank == 0:
        comm.send(x, 1)
        return
    time.sleep(SHORT)
    comm.recv(out, 0, timeout=5.0)
    assert_same(out, values(100, 5))


def test_host_memory_receives_from_a_rank_that_makes_no_calls(world):
    harness.run(idle_sender, 2, world=world)
