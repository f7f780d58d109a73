"""Ranks whose calls differ where some exchange objects: a call of several parts ends on all ranks, or on none."""

from contextlib import suppress

import numpy as np
import pytest

import harness
from cases.no_fast_path import on_path
from harness.failures import raised
from ringcomm import MismatchError, objects

SHORT = "x" * 10  # in a record
INLINE = "x" * 462  # its pickle, of 480 bytes, is a second broadcast that does not wait for all ranks
LONG = "x" * 10_000
ARRAYS = [np.arange(1 << 14), np.ones(1 << 15)]  # each a broadcast of its own, behind a record

EXCHANGES = {
    "broadcast": lambda comm, obj, root: comm.broadcast_object(obj, root),
    "scatter": lambda comm, obj, root: objects.scatter(comm, [obj] * comm.size, root),
    "gather": lambda comm, obj, root: comm.gather_object(obj, root),
    "all_gather": lambda comm, obj, root: comm.all_gather_object(obj),
    "all_to_all": lambda comm, obj, root: objects.all_to_all(comm, [obj] * comm.size),
}


def check_in_step(comm):
    """Equal calls have right results, and the same epochs on all ranks."""
    for i in range(3):
        assert comm.all_reduce(np.full(2, comm.rank + i)).tolist() == [sum(range(comm.size)) + comm.size * i] * 2
    mismatch = raised(MismatchError, lambda: comm.all_reduce(np.ones(1 + comm.rank)))
    assert len({*comm.all_gather_object(mismatch.epoch)}) == 1


def differ(comm, exchange, obj, root, general):
    """The last rank makes another call."""
    with on_path(comm, general):
        for _ in range(3):
            if comm.rank == comm.size - 1:
                error = raised(MismatchError, lambda: comm.all_reduce(np.ones(1)))
            else:
                error = raised(MismatchError, lambda: EXCHANGES[exchange](comm, obj, root))
            assert f"rank {comm.size - 1}: all_reduce(float64 x 1, sum)" in str(error)
            check_in_step(comm)


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("obj", [INLINE, LONG, ARRAYS], ids=["inline", "long", "arrays"])
@pytest.mark.parametrize("exchange", ["broadcast", "scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_of_an_object_in_parts_leaves_the_ranks_in_step(size, exchange, obj, general):
    harness.run(differ, size, exchange, obj, 0, general)


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.ranks(2)
def test_a_mismatch_of_a_gather_leaves_no_long_object_behind(comm, general):
    """The rank whose object does not fit a record sends it only to a root that gathers."""
    with on_path(comm, general):
        for length in (10_000, 1_000_000):
            obj = "x" * length
            raised(MismatchError, comm.barrier if comm.rank == 0 else lambda obj=obj: comm.gather_object(obj))
            gathered = comm.gather_object(length)
            assert gathered == [length] * comm.size or comm.rank
            assert comm.rank or [len(each) for each in comm.gather_object("y")] == [1, 2 * length]
            assert comm.rank == 0 or comm.gather_object(2 * obj) is None


def mismatch_before(comm):
    """Rank 0 has returned from a broadcast that differs; a split, of several parts, has found it but not raised it."""
    with suppress(MismatchError):
        comm.broadcast(np.zeros(2 + (comm.rank != 0)))
    comm.split(0)


def exchange_after(comm, exchange, obj, general):
    with on_path(comm, general):
        mismatch_before(comm)
        if comm.rank == 0:
            assert "broadcast" in str(raised(MismatchError, lambda: EXCHANGES[exchange](comm, obj, comm.size - 1)))
        else:
            EXCHANGES[exchange](comm, obj, comm.size - 1)
        check_in_step(comm)


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("obj", [SHORT, INLINE, LONG, ARRAYS], ids=["short", "inline", "long", "arrays"])
@pytest.mark.parametrize("exchange", ["broadcast", "scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_of_a_call_before_leaves_no_object_half_way(size, exchange, obj, general):
    """The object call succeeds on all ranks, if need be in several parts; then rank 0 raises the mismatch."""
    harness.run(exchange_after, size, exchange, obj, general)
