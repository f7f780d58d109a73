"""Collectives by copy engines, on the emulated device: two kernels of one block, and copies between them."""

import numpy as np
import pytest

import harness
from cases.on_device import behind_a_gate
from cases.reference import assert_same, filled
from ringcomm import MismatchError
from ringcomm.devices import emulated

BYTES = 64 << 10
ROWS = BYTES // 16  # of two int64 each
ON = [("RINGCOMM_COPY_ENGINE_BYTES", str(BYTES))]


def launches(call, *arguments, **options):
    """Return what a call returns, and how many kernels it has launched."""
    before = emulated.calls().launches
    result = call(*arguments, **options)
    emulated.device.stream().synchronize()
    return result, emulated.calls().launches - before


def buffer(comm, rows):
    """Return an array in a symmetric buffer, and what each rank has there."""
    inputs = [filled(rank, (rows, 2), "int64") for rank in range(comm.size)]
    x = comm.empty((rows + 3, 2), "int64", device="emulated")[3:]
    x[:] = inputs[comm.rank]
    comm.barrier()
    return x, inputs


@pytest.mark.ranks(3, env=dict(ON))
def test_copy_engines_move_what_lies_in_symmetric_buffers(comm):
    size, rank = comm.size, comm.rank
    x, inputs = buffer(comm, ROWS)
    out = emulated.empty((ROWS * size, 2), "int64")
    assert launches(comm.all_gather, x, out)[1] == 2
    assert_same(out, np.concatenate(inputs))

    whole, inputs = buffer(comm, ROWS * size)
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    out, launched = launches(comm.all_to_all, whole, emulated.empty(whole.shape, "int64"))
    assert launched == 2
    assert_same(out, np.concatenate([each[own] for each in inputs]))
    assert_same(whole, inputs[rank])
    assert launches(comm.all_gather, whole[own], whole)[1] == 2  # in place
    gathered = np.concatenate([inputs[each][each * ROWS : (each + 1) * ROWS] for each in range(size)])
    assert_same(whole, gathered)

    for root in range(size):
        x, inputs = buffer(comm, ROWS)
        assert launches(comm.broadcast, x, root=root)[1] == 2
        assert_same(x, inputs[root])
    work = comm.broadcast(x, root=0, async_op=True)
    work.wait()
    assert_same(x, inputs[size - 1])


@pytest.mark.ranks(2, env=dict(ON))
def test_kernels_move_the_rest(comm):
    x, inputs = buffer(comm, ROWS)
    short, _ = buffer(comm, ROWS - 1)
    for given in (short, emulated.array(x)):
        assert launches(comm.broadcast, given)[1] == 1
    whole, inputs = buffer(comm, ROWS * comm.size)
    blocks = [each[comm.rank * ROWS : (comm.rank + 1) * ROWS] for each in inputs]
    assert launches(comm.all_to_all, whole, out=whole)[1] == 1  # in place
    assert_same(whole, np.concatenate(blocks))
    counts = [ROWS + 1, *[ROWS] * (comm.size - 1)]
    assert launches(comm.all_gather, whole[: counts[comm.rank]], counts=counts)[1] == 1
    assert launches(comm.all_reduce, x)[1] == 1


@pytest.mark.ranks(2, world="processes")
def test_without_the_setting_kernels_move_all(comm):
    x, _ = buffer(comm, ROWS)
    assert launches(comm.broadcast, x)[1] == 1


def apart(comm):
    x = comm.empty((ROWS + 4, 2), "int64", device="emulated")
    out = emulated.array(np.full((ROWS * comm.size, 2), 7))
    with pytest.raises(MismatchError, match="do not agree on where their arrays lie in symmetric buffers, as copy eng"):
        comm.all_gather(x[comm.rank : comm.rank + ROWS], out)
    assert not x.any()  # no rank writes to another


def unequal(comm):
    x = comm.empty((ROWS, 2), "int64", device="emulated")
    x = x if comm.rank else emulated.array(x)
    with pytest.raises(MismatchError, match="do not agree on where their arrays lie") as caught:
        comm.broadcast(x)
    assert str(caught.value).count(" by copy engines") == 1


@pytest.mark.parametrize("case", [apart, unequal])
def test_arrays_at_different_places_are_a_mismatch_that_writes_no_memory_of_others(case):
    with harness.world(2, settings=ON) as pool:
        pool.run(case, ())


@pytest.mark.ranks(2, env=dict(ON))
def test_copies_keep_the_order_of_calls(comm):
    x, inputs = buffer(comm, ROWS)
    out = emulated.empty((ROWS * comm.size, 2), "int64")
    emulated.EmulatedDevice.blocking = False
    try:
        work, gate = behind_a_gate(comm)  # a launch that is not yet over
        comm.all_gather(x, out)
        gate.open()
        work.wait()
        emulated.device.stream().synchronize()
    finally:
        emulated.EmulatedDevice.blocking = True
    assert_same(out, np.concatenate(inputs))
    for _ in range(300):  # more launches than are in flight at once
        comm.all_gather(x, out)
    assert_same(out, np.concatenate(inputs))
