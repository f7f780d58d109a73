"""Messages of arrays on GPUs, on the emulated device: matching, order, values, host memory at one end."""

import numpy as np
import pytest

import harness
from cases.gpu_messages import (
    ALL,
    SLOT,
    all_to_all,
    at_random,
    device_array,
    every_call,
    mixed,
    out_of_order,
    values,
    wrong_size,
)
from cases.on_device import Gate, synchronize
from cases.reference import assert_same
from ringcomm import MismatchError
from ringcomm.devices import emulated

PINNED = 10 << 20  # bytes for the messages of a communicator, at most (bindings/src/cuda/messages.cpp)

as_on_a_gpu = pytest.mark.usefixtures("streams_as_on_a_gpu")


@as_on_a_gpu
@pytest.mark.ranks(2)
def test_messages_stay_on_the_gpu(comm):
    """No message takes pinned memory, as those do that pass through the host."""
    comm.sendrecv(device_array(1, 0), 1 - comm.rank, emulated.empty(1, np.uint8), 1 - comm.rank)  # connects
    comm.barrier()
    before = emulated.pinned_bytes()
    comm.barrier()
    every_call(comm)
    comm.barrier()
    assert emulated.pinned_bytes() <= before
    comm.barrier()


@as_on_a_gpu
def test_calls_of_four_ranks():
    harness.run(every_call, 4, world="threads")


def test_blocking_calls_of_threads(world):
    harness.run(every_call, 2, world=world)


@as_on_a_gpu
def test_either_end_may_be_in_host_memory(world):
    harness.run(mixed, 2, world=world)


@as_on_a_gpu
@pytest.mark.ranks(2, world="threads")
def test_pinned_memory_at_a_host_end_is_bounded(comm):
    """Move far more at once between host memory and GPUs than there is pinned memory."""
    other, size, tags = 1 - comm.rank, 7_000_001, range(4)
    comm.sendrecv(device_array(1, 0), other, emulated.empty(1, np.uint8), other)  # connects
    comm.barrier()
    before = emulated.pinned_bytes()
    comm.barrier()
    sent = [(values if tag % 2 else device_array)(size, 10 * comm.rank + tag) for tag in tags]
    got = [(emulated.empty if tag % 2 else np.empty)(size, np.uint8) for tag in tags]
    works = [comm.recv(got[tag], other, tag, async_op=True) for tag in tags]
    works += [comm.send(sent[tag], other, tag, async_op=True) for tag in reversed(tags)]
    for work in works:
        work.synchronize()
    for tag in tags:
        assert_same(got[tag], values(size, 10 * other + tag))
    comm.barrier()
    used = emulated.pinned_bytes() - before
    comm.barrier()
    assert 1 << 20 <= used <= 2 * PINNED


@as_on_a_gpu
@pytest.mark.ranks(1, world="threads")
def test_a_rank_sends_to_itself(comm):
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
@pytest.mark.ranks(1, world="threads")
def test_a_refused_message_of_a_rank_to_itself_keeps_its_memory(comm):
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
def test_messages_out_of_order_do_not_block(world):
    harness.run(out_of_order, 2, world=world)


@as_on_a_gpu
def test_all_to_all_of_five_ranks(world):
    harness.run(all_to_all, 5, world=world)


@as_on_a_gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_messages(seed):
    harness.run(at_random, 3, seed, world="threads" if seed % 2 else "processes")


@as_on_a_gpu
def test_a_message_of_another_size_is_a_mismatch(world):
    harness.run(wrong_size, 2, world=world)


@pytest.mark.ranks(2, world="processes")
def test_gpus_that_do_not_reach_each_other_use_host_memory(comm):
    emulated.configure(unreachable=True)
    try:
        with comm.split(0) as group:
            for size in (0, 1, 3 * SLOT):
                x, out = device_array(size, comm.rank), emulated.empty(size, np.uint8)
                group.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
                assert_same(out, values(size, 1 - comm.rank))
            comm.barrier()
    finally:
        emulated.configure()
