"""Symmetric buffers on the emulated device. The ring sums in another order, which shows the path taken."""

import gc
import weakref
from unittest.mock import patch

import numpy as np
import pytest

import harness
from cases.on_device import mappings
from cases.reference import assert_same, filled, reduced
from ringcomm import MemoryShortage
from ringcomm.devices import emulated
from ringcomm.transports.cuda import symmetric

MANY = 30_000  # elements, enough for the ring


def inputs_of(comm, rows, dtype="float32"):
    """Return the input of each rank."""
    return [filled(rank, (rows, 2), dtype) for rank in range(comm.size)]


def buffer_of(comm, values, rows=0):
    """Return values in a symmetric buffer, after `rows` other rows."""
    x = comm.empty((rows + len(values), 2), values.dtype, device="emulated")[rows:]
    x[:] = values
    return x


@pytest.mark.ranks(3)
def test_an_all_reduce_of_symmetric_buffers_has_the_bits_of_the_cpu(comm):
    for dtype, op in (("float32", "sum"), ("bfloat16", "avg")):
        inputs = inputs_of(comm, MANY // 2, dtype)
        x = buffer_of(comm, inputs[comm.rank])
        expected = reduced(inputs, op)
        plain = comm.all_reduce(emulated.array(inputs[comm.rank]), op)
        assert not np.array_equal(plain, expected)  # the ring
        out = buffer_of(comm, inputs[comm.rank] * 0, rows=3)
        assert_same(comm.all_reduce(x, op, out=out), expected)
        assert_same(x, inputs[comm.rank])
        assert_same(comm.all_reduce(x, op), expected)
        y = comm.empty((len(x) + 1, 2), dtype, device="emulated")
        y = y[1:] if comm.rank == 2 else y[:-1]  # at another offset
        y[:] = inputs[comm.rank]
        assert_same(comm.all_reduce(y, op), plain)
        z = buffer_of(comm, inputs[comm.rank])
        z = z if comm.rank else emulated.array(z)  # in no buffer
        assert_same(comm.all_reduce(z, op), plain)


@pytest.mark.ranks(3)
def test_a_reduce_scatter_of_symmetric_buffers_has_the_bits_of_the_cpu(comm):
    inputs = inputs_of(comm, 6000 * comm.size)
    x = buffer_of(comm, inputs[comm.rank])
    expected = np.split(reduced(inputs, "sum"), comm.size)[comm.rank]
    ring = comm.reduce_scatter(emulated.array(x))
    assert np.array_equal(ring, expected) == (comm.rank == comm.size - 1)  # the last segment is summed in rank order
    assert_same(comm.reduce_scatter(x), expected)
    rows = [6000 * comm.size - comm.size + 1, *[1] * (comm.size - 1)]
    expected = np.split(reduced(inputs, "sum"), np.cumsum(rows)[:-1])[comm.rank]
    assert_same(comm.reduce_scatter(x, counts=rows), expected)


@pytest.mark.ranks(3)
def test_blocks_move_between_symmetric_buffers(comm):
    inputs = inputs_of(comm, 6000 * comm.size)
    own = slice(6000 * comm.rank, 6000 * (comm.rank + 1))
    x = buffer_of(comm, inputs[comm.rank])
    whole = np.concatenate([each[6000 * rank : 6000 * (rank + 1)] for rank, each in enumerate(inputs)])
    assert_same(comm.all_gather(x[own], out=x), whole)
    x[:] = inputs[comm.rank]
    expected = np.concatenate([each[own] for each in inputs])
    assert_same(comm.all_to_all(x, out=emulated.empty(x.shape, x.dtype)), expected)
    assert_same(comm.all_to_all(x, out=x), expected)


@pytest.mark.ranks(3, world="processes")
def test_buffers_that_no_rank_uses_are_freed(comm):
    comm.empty(1, "int8", device="emulated")
    views = []
    for _ in range(3):
        buffer = comm.empty(10, "int8", device="emulated")
        views.append(buffer[2:])
        before = mappings()
        for _ in range(4):
            buffer = comm.empty(1000, "int8", device="emulated")
            gc.collect()
        assert mappings() <= before + 2 * comm.size  # the last two
        del buffer
        gc.collect()
    views[0][:] = 7  # a view keeps the buffer
    assert_same(views[0], np.full(8, 7, np.int8))

    def after_the_next():
        comm.empty(1, "int8", device="emulated")
        gc.collect()
        return mappings()

    after_the_next()
    before = after_the_next()
    if comm.rank:
        views.clear()  # not on rank 0, so no rank may free them
    assert after_the_next() == before
    views.clear()
    assert after_the_next() == before - 3 * comm.size


def too_large(comm):
    with pytest.raises(MemoryShortage, match=r"empty\(\(7777,\), int8, emulated\): no more"):
        comm.empty(7777, "int8", device="emulated")
    assert_same(comm.empty(5, "int8", device="emulated"), np.zeros(5, np.int8))


def test_a_shortage_on_one_rank_is_raised_on_all(monkeypatch):
    allocate = emulated.EmulatedDevice.allocate
    requests = []

    def short(device, size, what):
        if 7777 <= size < 8000:
            requests.append(size)
            if len(requests) == 2:  # any rank
                raise MemoryShortage(f"{what}: no more")
        return allocate(device, size, what)

    monkeypatch.setattr(emulated.EmulatedDevice, "allocate", short)
    harness.run(too_large, 3, world="threads")


@pytest.mark.ranks(2, world="processes")
def test_buffers_are_freed_although_one_rank_keeps_many_others(comm):
    with patch.object(symmetric, "MAX_RELEASED", 2):
        keep_some(comm)


def keep_some(comm):
    make = lambda: comm.empty(1, "int8", device="emulated")  # noqa: E731 (one expression)
    kept = [make() for _ in range(4)] if comm.rank else []
    if not comm.rank:
        for _ in range(4):
            make()
    before = mappings()
    for _ in range(10):
        make()
        gc.collect()
    assert mappings() <= before + 2 * comm.size
    assert len(kept) == 4 * (comm.rank > 0)


@pytest.mark.ranks(2, world="processes")
def test_dropped_memory_is_available_to_the_next_buffer(comm):
    limit = 1 << 20
    allocate, held = emulated.EmulatedDevice.allocate, []

    def short(device, size, what):
        if size < 1 << 19:
            return allocate(device, size, what)
        held[:] = [each for each in held if each() is not None]
        if held:
            raise MemoryShortage(f"{what}: no more")
        memory = allocate(device, size, what)
        held.append(weakref.ref(memory))
        return memory

    with patch.object(emulated.EmulatedDevice, "allocate", short):
        x = comm.empty(limit, "int8", device="emulated")
        before = mappings()
        for _ in range(3):
            with pytest.raises(MemoryShortage):
                comm.empty(limit, "int8", device="emulated")
        assert mappings() <= before
        del x
        gc.collect()
        assert comm.empty(limit, "int8", device="emulated").size == limit


def test_an_impossible_size_is_a_shortage_with_figures():
    for size in (1 << 45, 1 << 80):
        with pytest.raises(MemoryShortage, match=r"an array on emulated needs .* MiB, but only"):
            emulated.device.allocate(size, "an array")
