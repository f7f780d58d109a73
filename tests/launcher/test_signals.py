"""A signal handler that interrupts a wait of a communicator may close the communicator, not wait in it."""

import os
import signal

import numpy as np
import pytest

from harness.failures import check_usable, raised, until_waiting
from ringcomm import ArgumentError, PeerLost


@pytest.mark.ranks(2, world="processes")
def test_a_handler_may_close_the_interrupted_communicator_but_not_wait_in_it(comm):
    group = comm.split(0)
    pids = comm.all_gather(np.array(os.getpid()))
    if comm.rank == 0:
        until_waiting(group, 1)
        os.kill(pids[1], signal.SIGTERM)
        lost = raised(PeerLost, group.barrier)
        assert lost.rank == 1
        assert "rank 1 closed the communicator" in str(lost)
        comm.barrier()
    else:
        refused = []

        def close(*_):
            refused.append(raised(ArgumentError, group.barrier))
            group.close()

        before = signal.signal(signal.SIGTERM, close)
        ended = raised(ArgumentError, lambda: group.recv(np.zeros(1), 0))
        signal.signal(signal.SIGTERM, before)
        comm.barrier()  # rank 0 knows without a second close
        group.close()
        assert "signal handler" in str(refused[0])
        assert "closed" in str(ended)
        assert "closed" in repr(group)
    check_usable(comm)


@pytest.mark.ranks(2, world="processes")
def test_a_nested_handler_knows_every_communicator_it_interrupts(comm):
    """The second handler interrupts the wait of the first, in another communicator."""
    outer, inner = comm.split(0), comm.split(0)
    pids = comm.all_gather(np.array(os.getpid()))
    if comm.rank == 0:
        for group, number in ((outer, signal.SIGTERM), (inner, signal.SIGUSR1)):
            until_waiting(group, 1)
            os.kill(pids[1], number)
        inner.barrier()
        assert raised(PeerLost, outer.barrier).rank == 1
        comm.barrier()
    else:
        handlers = {signal.SIGTERM: lambda *_: inner.barrier(), signal.SIGUSR1: lambda *_: outer.close()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        raised(ArgumentError, lambda: outer.recv(np.zeros(1), 0))
        for number, handler in before.items():
            signal.signal(number, handler)
        comm.barrier()
        outer.close()
    check_usable(comm)
