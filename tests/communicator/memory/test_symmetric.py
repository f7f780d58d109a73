"""Symmetric buffers: valid in every collective, accessed directly, and freed when dropped."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import harness
from cases.collectives import PLANS, Arrays, Symmetric, pairwise, start
from cases.reference import assert_same, filled, numpy_dtype
from ringcomm import Config
from ringcomm.commands.algorithms import call_each_size
from ringcomm.types import DTYPES

PAGE = 4096
AXES = {
    "collective": list(PLANS),
    "length": [(0, 0), (0, 1), (0, 7), (1, 5)],
    "dtype": ["int8", "float32", "complex128"],
    "place": ["default", "out", "in place"],
    "async_op": [False, True],
    "root": [0, -1],
    "counts": ["none", "even", "uneven", "zeros"],
    "offset": [0, 1, 64],
}
MIXTURES = {
    "all": lambda rank: 0,
    "all but one": lambda rank: None if rank == 1 else 0,
    "at different places": lambda rank: 64 * rank,
    "in different buffers": lambda rank: 67 * rank,
}


def check(comm, cases, segment, mixture):
    """Run each case on memory of a buffer, or on a plain array if the mixture has None for this rank."""
    buffers = [comm.empty(64 * segment, np.uint8) for _ in range(1 + (mixture == "in different buffers"))]
    buffer = buffers[comm.rank % len(buffers)]
    place = MIXTURES[mixture](comm.rank)
    for case in cases:
        arrays = Arrays(case.offset) if place is None else Symmetric(buffer, case.offset + place)
        start(comm, case, segment, arrays)()


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_on_symmetric_memory_are_exact(size, mixture):
    harness.run(check, size, pairwise(AXES, seed=size), Config().segment_bytes, mixture)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_collectives_are_exact_where_even_one_element_is_accessed_directly(size, mixture, monkeypatch):
    for name in ("DIRECT", "ONE_SHOT", "NONTEMPORAL"):
        monkeypatch.setenv(f"RINGCOMM_{name}_BYTES", "1")
    harness.run(check, size, pairwise(AXES, seed=size), PAGE, mixture, world="threads")


def at_different_places(comm, largest, private):
    buffers = [comm.empty(2 * largest, np.uint8) for _ in range(2)]
    if comm.rank % 2:
        buffers.reverse()
    source, target = (buffer[64 * comm.rank :][:largest] for buffer in buffers)
    if comm.rank == private:
        source, target = source.copy(), target.copy()
    calls = [call for name in PLANS for call in call_each_size(comm, name, "symmetric", source, target)]
    return {call.collective: call.path for call in calls if call.size == largest}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_access_buffers_at_different_places_directly(size):
    found = harness.run(at_different_places, size, 1 << 20, None)
    assert found == [dict.fromkeys(PLANS, "symmetric")] * size


def test_a_buffer_that_a_path_does_not_need_may_be_private():
    found = harness.run(at_different_places, 3, 1 << 20, 2)[0]
    assert {name for name, path in found.items() if path == "symmetric"} == {"broadcast", "gather", "scatter"}


COPIED = (("RINGCOMM_DIRECT_BYTES", "1"), ("RINGCOMM_CMA_BYTES", "1"))


def test_the_kernel_copies_from_the_ranks_with_private_memory_only():
    found = harness.run(at_different_places, 3, 1 << 20, 2, settings=COPIED)[0]
    assert {name for name, path in found.items() if path == "cma"} == {"all_gather", "all_to_all"}
    harness.run(check, 3, pairwise(AXES, seed=3), Config().segment_bytes, "all but one", settings=COPIED)


@pytest.mark.ranks(2, 3)
def test_messages_from_and_to_symmetric_memory_are_exact(comm):
    """Send from symmetric memory and receive in it, while the sender changes what it has sent."""
    length = 3_000_001  # read in two parts
    memory, plain = comm.empty(length + 1, "int32"), np.empty(length + 1, np.int32)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn, (source, target) in enumerate([(memory, plain), (plain, memory), (memory, plain)]):
        source[1:] = filled(comm.rank, length, "int32", turn)
        comm.sendrecv(source[1:], right, target[1:], left)
        source[1:] = -1
        assert_same(target[1:], filled(left, length, "int32", turn))


@pytest.mark.ranks(2, 4)
def test_source_and_target_may_be_in_different_buffers(comm):
    for turn, length in enumerate((100, 100_000, 1_000_003)):
        x, y = comm.empty(length + turn, "int32"), comm.empty((2, length), np.int32)
        inputs = [filled(rank, length, "int32") for rank in range(comm.size)]
        x[turn:] = inputs[comm.rank]
        assert comm.all_reduce(x[turn:], out=y[1]) is not x
        assert_same(y[1], sum(inputs[1:], inputs[0]))
        assert not y[0].any()
        assert_same(x[turn:], inputs[comm.rank])
        parts = comm.empty((comm.size, length), np.int32)
        comm.all_gather(x[turn:], out=parts)
        assert_same(parts, np.stack(inputs))


@pytest.mark.ranks(2)
def test_a_symmetric_buffer_is_zero_at_first(comm):
    for name in DTYPES:
        for shape in ((), 0, 5, (3, 0, 2), (2, 70_000)):
            dtype = numpy_dtype(name)
            x = comm.empty(shape, dtype)
            assert isinstance(x, np.ndarray)
            assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
            assert x.dtype == dtype
            assert x.flags.c_contiguous
            assert x.flags.writeable
            assert not any(x.tobytes())
            x.fill(1)  # the next buffer must still be zero


@pytest.mark.ranks(3)
def test_a_view_keeps_the_memory_when_the_communicator_is_closed(comm):
    group = comm.split(0)
    x, peek = group.empty(100_000, "int64"), None
    x[:] = comm.rank
    group.all_reduce(x)
    peek = x[5:10]
    if comm.rank == 0:
        del x
    group.close()
    comm.barrier()
    assert_same(peek, np.full(5, comm.size * (comm.size - 1) // 2))
    peek[:] = 3
    comm.all_reduce(peek)  # plain memory to another communicator
    assert_same(peek, np.full(5, 3 * comm.size))


def shared_bytes():
    """Return the size of the files of this process's communicators, in bytes."""
    sizes = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:ringcomm"):
                status = entry.stat()
                sizes[status.st_ino] = 512 * status.st_blocks
        except OSError:
            continue  # the descriptor that lists the folder
    return sum(sizes.values())


@pytest.mark.ranks(3)
def test_dropped_buffers_release_their_memory(comm):
    gc.collect()  # no communicator of an earlier test may release its memory during this one
    comm.barrier()
    size, before = 1 << 20, shared_bytes()
    comm.barrier()
    for turn in range(40):
        x = comm.empty(size, "uint8")
        x.fill(turn)
        view = x[10:]
        del x
        comm.all_reduce(view)
        del view
        comm.barrier()
    assert shared_bytes() - before < 2 * comm.size * size
    keep = [comm.empty(size, "uint8") for _ in range(8)]
    comm.barrier()
    assert shared_bytes() - before >= 8 * comm.size * size
    comm.barrier()
    del keep
    comm.barrier()
    assert shared_bytes() - before < 2 * comm.size * size
    comm.barrier()


@pytest.mark.ranks(4)
def test_a_group_has_buffers_of_its_own(comm):
    whole = comm.empty(60_000, "int32")
    group = comm.split(comm.rank % 2, key=-comm.rank)
    x = group.empty(60_000, "int32")
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    for array in (x, whole):  # the parent's buffer is an ordinary array to the group
        array[:] = comm.rank
        group.all_reduce(array)
        assert_same(array, np.full(60_000, sum(members), np.int32))
    comm.barrier()
    x[:] = whole[:] = comm.rank
    comm.all_reduce(x)  # and the group's to the parent
    comm.all_reduce(whole)
    assert_same(x, np.full(60_000, sum(range(comm.size)), np.int32))
    assert_same(whole, x)
    group.close()
