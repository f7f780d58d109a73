"""The start of messages of arrays on GPUs: without Python, and without memory that is kept."""

import sys

import numpy as np
import pytest

import harness
from cases.gpu_messages import SIZES, device_array, values
from cases.on_device import synchronize
from cases.reference import assert_same
from ringcomm import MismatchError
from ringcomm.devices import emulated
from ringcomm.transports.cuda import messages


@pytest.mark.ranks(2, world="processes", fresh=True)
def test_messages_start_without_python(comm):
    """Only the first message passes through Python."""
    emulated.EmulatedDevice.blocking, comm, other = False, comm.split(0), 1 - comm.rank
    x, out = device_array(300, comm.rank), emulated.empty(300, np.uint8)
    comm.sendrecv(x, other, out, other)
    comm.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(messages.GpuMessages, "start")
        for size in SIZES:
            x, expected = device_array(size, comm.rank), values(size, other)
            outs = [emulated.empty(size, np.uint8) for _ in range(4)] + [emulated.empty(size + 3, np.uint8)]
            assert comm.sendrecv(x, other, outs[0], None) == other
            if comm.rank == 0:
                comm.send(x, other, tag=1)
                assert comm.recv(outs[1], other, tag=1) == other
            else:
                assert comm.recv(outs[1], None, tag=1) == other
                comm.send(x, other, tag=1)
            receives = [comm.recv(outs[2], other, tag=2, async_op=True), comm.recv(outs[3], tag=3, async_op=True)]
            receives.append(comm.recv(outs[4], other, tag=4, at_most=True, async_op=True))
            sends = [comm.send(x, other, tag=tag, async_op=True) for tag in (4, 3, 2)]
            assert [work.wait() for work in receives + sends] == [other] * 3 + [None] * 3
            synchronize()
            for out in outs:
                assert_same(out[:size], expected)
        with pytest.raises(MismatchError):
            comm.sendrecv(x, other, emulated.empty(size + 1 + comm.rank, np.uint8), other)
    comm.close()


def without_allocations(comm):
    emulated.EmulatedDevice.blocking = False
    x, out, other = device_array(8, 0), emulated.empty(8, np.uint8), 1 - comm.rank

    def calls(number):
        for _ in range(number):
            comm.send(x, other)
            comm.recv(out, other)
            comm.sendrecv(x, other, out, other)
            works = comm.recv(out, other, async_op=True), comm.send(x, other, async_op=True)
            for work in works:
                work.synchronize()

    calls(30)
    before = sys.getallocatedblocks()
    calls(100)
    return sys.getallocatedblocks() - before


def test_messages_keep_no_memory():
    with harness.world(2) as pool:
        assert max(pool.run(without_allocations, ())) < 50  # of 500 messages
