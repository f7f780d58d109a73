"""What the works of messages hold, also those that a program drops."""

import gc
import weakref

import numpy as np
import pytest
from test_messages import LARGE, message, room

from cases.between_hosts import everywhere
from harness.failures import raised, until
from ringcomm.transports.messages import Envelope


@everywhere
def test_a_dropped_work_keeps_its_memory_until_it_is_done(comm):
    """A receive whose work was dropped fills its memory, which lives as long as the receive."""
    messages, peer = comm.messages, 1 - comm.rank
    x = room(LARGE)
    with memoryview(x) as view:
        messages.irecv(view, peer, 0)
        assert raised(BufferError, view.release)  # the receive uses it
        comm.barrier()
        messages.isend(message(comm.rank, LARGE), peer, 0)  # its array has no other reference
        until(lambda: (x[:LARGE] == message(peer, LARGE)).all(), "the message")
        comm.barrier()

        def released():
            messages.isend(b"", comm.rank, 1)  # a start lets go of works that are done
            messages.recv_bytes(comm.rank, 1)
            try:
                view.release()
            except BufferError:
                return False
            return True

        until(released, "the memory")


class Holder(np.ndarray):
    """An array that holds works, and drops them when its memory is released."""


@pytest.mark.ranks(1, world="threads")
def test_memory_that_is_released_may_drop_works(comm):
    """The memory of a work that is let go may drop other works."""
    for _ in range(3):
        arrays = [np.zeros(4, np.uint8).view(Holder) for _ in range(8)]
        for tag, array in enumerate(arrays):
            array.works = [comm.messages.irecv(np.zeros(4, np.uint8), comm.rank, 100 + tag) for _ in range(9)]
            comm.messages.irecv(array, comm.rank, tag)
        holders = [weakref.ref(array) for array in arrays]
        del array, arrays
        for tag in range(8):
            comm.messages.send(b"done", comm.rank, tag)
        comm.messages.isend(b"", comm.rank, 200)
        comm.messages.recv_bytes(comm.rank, 200)
        assert [holder() for holder in holders] == [None] * 8
        for tag in range(8):
            for _ in range(9):
                comm.messages.send(b"also", comm.rank, 100 + tag)


@pytest.mark.ranks(1, world="threads")
def test_a_work_that_was_waited_for_holds_no_memory(comm):
    """A work that its own memory holds goes with it once it has been waited for."""
    array = np.zeros(4, np.uint8).view(Holder)
    array.work = comm.messages.irecv(array, comm.rank, 0)
    comm.messages.send(b"done", comm.rank, 0)
    assert array.work.wait() == array.work.wait() == Envelope(comm.rank, 0, 4)
    holder = weakref.ref(array)
    del array
    gc.collect()
    assert holder() is None
