"""Captured calls and their replays, on the emulated driver."""

import os

import numpy as np
import pytest

import harness
import ringcomm
from cases.on_device import connected
from cases.reference import assert_same
from harness.failures import until
from ringcomm import ArgumentError, PeerLost, RingcommError
from ringcomm.devices import emulated
from ringcomm.devices.driver import CudaError

pytestmark = pytest.mark.usefixtures("streams_as_on_a_gpu")

SHORT = 0.3  # seconds, of a wait that times out


@pytest.mark.ranks(3, world="threads")
def test_calls_are_captured_and_replayed(comm):
    connected(comm)
    stream = emulated.Stream()
    x, other, warm = (emulated.array(np.full(length, 1.0)) for length in (700, 5, 700))
    with stream:
        comm.all_reduce(warm)  # loads the kernel for this size
        stream.synchronize()
        with emulated.capture(stream) as graphs:
            comm.all_reduce(x)
            work = comm.all_reduce(other, async_op=True)
            work.wait()
            with pytest.raises(ArgumentError, match="equal blocks while a CUDA graph is captured"):
                comm.all_gather(x[: comm.rank + 1], counts=[*range(1, comm.size + 1)])
            with pytest.raises(ArgumentError, match=r"kernel is not loaded cannot be captured.*make it once before"):
                comm.all_reduce(x, "prod")
        assert_same(x, np.full(700, 1.0))
        for replays in (1, 2, 3):
            graphs[0].launch(stream)
            stream.synchronize()
            assert_same(x, np.full(700, float(comm.size**replays)))
            assert_same(other, np.full(5, float(comm.size**replays)))
        comm.all_reduce(x)
        stream.synchronize()
        assert_same(x, np.full(700, float(comm.size**4)))
    comm.check()
    comm.barrier()


@pytest.mark.ranks(2, world="threads")
def test_calls_in_two_captures_at_once_are_refused(comm):
    connected(comm)
    x = emulated.array(np.ones(5))
    first, second = emulated.Stream(), emulated.Stream()
    with emulated.capture(first) as graphs:
        with first:
            work = comm.all_reduce(x, async_op=True)
        with emulated.capture(second), second, pytest.raises(ArgumentError, match="two CUDA graphs at once"):
            comm.all_reduce(x)
        with first:
            work.wait()
    graphs[0].launch(first)
    first.synchronize()
    assert_same(x, np.full(5, float(comm.size)))
    comm.barrier()


def raises(comm):
    try:
        comm.check()
    except RingcommError:
        return True
    return False


@pytest.mark.ranks(2, world="threads")
def test_a_replay_without_its_peer_is_noticed_by_whoever_replays(comm):
    connected(comm)
    x = emulated.array(np.ones(5))
    stream = emulated.Stream()
    with emulated.capture(stream) as graphs, stream:
        comm.all_reduce(x, timeout=SHORT)
    if comm.rank:
        with pytest.raises(ringcomm.CollectiveTimeout):
            comm.recv(np.empty(1), 0)  # until its peer has timed out
        return
    graphs[0].launch(stream)
    stream.synchronize()
    until(lambda: raises(comm), "the failure of the replay")
    with pytest.raises(ringcomm.CollectiveTimeout, match=r"rank 0 waited 0.3 s in all_reduce.*not called by rank 1"):
        comm.all_reduce(x)
    graphs[0].launch(stream)  # as a program does that never asks
    stream.synchronize()
    assert_same(x, np.ones(5))
    with pytest.raises(ringcomm.CollectiveTimeout):
        comm.synchronize()


def replayed_without_a_dead_peer(comm):
    connected(comm)
    x = emulated.array(np.ones(5))
    stream = emulated.Stream()
    with emulated.capture(stream) as graphs, stream:
        comm.all_reduce(x)  # its timeout is that of the communicator, far beyond this test
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    graphs[0].launch(stream)
    stream.synchronize()
    with pytest.raises(PeerLost, match="rank 1"):
        comm.check()
    raise PeerLost("as expected", rank=1)


def test_a_replay_does_not_wait_for_a_peer_that_is_gone():
    with pytest.raises(PeerLost, match=r"as expected|rank 1"):
        ringcomm.launch(replayed_without_a_dead_peer, 2, world="processes", timeout=harness.OPERATION)


@pytest.mark.ranks(2, world="threads")
def test_a_call_in_a_capture_that_has_failed_is_refused(comm):
    connected(comm)
    x, stream = emulated.array(np.ones(5)), emulated.Stream()

    def capture():
        with emulated.capture(stream), stream:
            with pytest.raises(CudaError, match="UNSUPPORTED"):
                stream.synchronize()
            with pytest.raises(ArgumentError, match="the capture of this stream has failed"):
                comm.all_reduce(x)

    with pytest.raises(CudaError, match="INVALIDATED"):
        capture()
    comm.all_reduce(x)
    comm.synchronize()
    assert_same(x, np.full(5, float(comm.size)))


@pytest.mark.ranks(2, world="threads")
def test_a_graph_may_be_replayed_after_its_communicator_is_closed(comm):
    x, stream = emulated.array(np.ones(5000)), emulated.Stream()
    group = comm.split(0)
    with stream:
        group.all_reduce(x)
        stream.synchronize()
        with emulated.capture(stream) as graphs:
            group.all_reduce(x)
        graphs[0].launch(stream)
        group.close()  # the replay is queued, or runs
        graphs[0].launch(stream)
        stream.synchronize()
    assert_same(x, np.full(5000, float(comm.size**3)))
    comm.barrier()
