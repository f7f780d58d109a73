"""Messages of arrays on the emulated GPU: scenes for ranks of one host, or of several."""

import random

import numpy as np
import pytest

from cases.on_device import synchronize
from cases.reference import assert_same
from ringcomm import MismatchError
from ringcomm.devices import emulated

SLOT = emulated.device.message_shape.slot_bytes
ALL = SLOT * emulated.device.message_shape.slots
SIZES = (0, 1, 300, SLOT - 1, SLOT, SLOT + 1, 2 * ALL + 5)  # bytes


def values(size, seed):
    return ((np.arange(size) * 7 + 31 * seed) % 251).astype(np.uint8)


def device_array(size, seed):
    return emulated.array(values(size, seed))


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


def mixed(comm):
    """A message between the GPU and host memory, in each direction, with the receive before and after the send."""
    other = 1 - comm.rank
    for size in (0, 1, SLOT, 3_000_000):
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


def out_of_order(comm):
    """More than the slots hold, received in the opposite order."""
    count, size, other = 40, SLOT - 8, 1 - comm.rank
    sends = [comm.send(device_array(size, tag), other, tag, async_op=True) for tag in range(count)]
    for tag in reversed(range(count)):
        out = emulated.empty(size, np.uint8)
        comm.recv(out, other, tag)
        synchronize()
        assert_same(out, values(size, tag), f"tag {tag}")
    for send in sends:
        send.synchronize()


def all_to_all(comm):
    for size in (100, 2 * SLOT, ALL + 1):
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


def at_random(comm, seed):
    """The same messages on all ranks, in an order of each; their places, sizes and calls are random."""
    common, own = random.Random(seed), random.Random(seed + 100 * comm.rank)
    messages = [
        (common.randrange(comm.size), common.randrange(comm.size), tag, common.choice((0, 1, 77, SLOT, 3 * SLOT + 1)))
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


def wrong_size(comm):
    x, large = device_array(10, 0), device_array(2 * SLOT, 0)
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
