"""Calls that the fast path starts, as the objects of the front ends: what they return, and what they hold."""

import gc
import weakref

import numpy as np
import pytest

from harness.failures import raised, until
from ringcomm.native import StartedCall


class Work(StartedCall):
    """A subclass in Python, whose objects can be referred to weakly."""


@pytest.mark.ranks(2, world="threads")
def test_a_started_call_returns_what_the_blocking_call_returns(comm):
    """A call that is given as async_op is started, once, and returns what the blocking call would have returned."""
    fast, peer = comm.fast_path, 1 - comm.rank
    x, out = np.full(4, comm.rank + 1.0), np.zeros(4)
    reduce = Work()
    assert reduce.done()
    assert raised(RuntimeError, reduce.wait)
    assert fast.all_reduce(x, out, "sum", None, reduce) is reduce
    assert reduce.wait() is reduce.wait(1.0) is out
    assert (out == 3).all()
    assert fast.all_reduce(x, out, "sum", None, reduce) is NotImplemented
    assert fast.barrier(None, StartedCall()).wait() is None
    send = fast.send(x, peer, 3, None, StartedCall())
    receive = fast.recv(out, peer, 3, False, None, StartedCall())
    assert receive.wait() == peer
    assert send.wait() is None
    assert send.done()
    assert (out == peer + 1).all()


@pytest.mark.ranks(2, world="threads")
def test_a_dropped_call_keeps_its_arrays_until_it_is_done(comm):
    """A receive that only itself refers to is collected; its array lives as long as it runs."""
    fast, peer = comm.fast_path, 1 - comm.rank
    x = np.zeros(4)
    receive = Work()
    receive.itself = receive
    fast.recv(x, peer, 0, False, None, receive)
    call, array = weakref.ref(receive), weakref.ref(x)
    del receive, x

    def collected():
        gc.collect()  # does nothing while the other rank's thread collects
        return call() is None

    until(collected, "the call")
    assert array() is not None
    comm.barrier()
    comm.send(np.ones(4), peer)

    def released():
        fast.send(np.ones(1), comm.rank, 1, None, StartedCall())  # a start lets go of calls that are done
        comm.recv(np.ones(1), comm.rank, 1)
        return array() is None

    until(released, "the array")


@pytest.mark.ranks(2, world="threads")
def test_the_garbage_collector_sees_the_arrays_of_a_call(comm):
    """The garbage collector follows a call to its arrays once it is done: those of PyTorch may refer to the call."""
    fast, peer = comm.fast_path, 1 - comm.rank
    x = np.zeros(4)
    receive = fast.recv(x, peer, 0, False, None, StartedCall())
    assert not any(each is x for each in gc.get_referents(receive))
    comm.barrier()
    comm.send(np.ones(4), peer)
    until(receive.done, "the receive")
    assert any(each is x for each in gc.get_referents(receive))
