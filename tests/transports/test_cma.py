"""Copies by cross-memory attach: exact, with mismatches reported, and replaced by staging where it is forbidden."""

import os

import numpy as np
import pytest
from test_collectives import AXES, check

import harness
from cases.collectives import Case, pairwise, start
from cases.reference import assert_same, filled
from harness import sandbox
from harness.failures import check_usable, raised, survivors_of
from ringcomm import MismatchError, RingcommError

COPIED = (("RINGCOMM_CMA_BYTES", "1"),)
SEGMENT = 4096
LAST = 1 << 20  # CollectiveOp::read


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_collectives_over_cma_are_exact(size):
    harness.run(check, size, pairwise(AXES, seed=20 + size), SEGMENT, settings=COPIED)


@pytest.mark.parametrize("limit", [SEGMENT - 1, SEGMENT, SEGMENT + 1])
def test_collectives_are_exact_around_the_cma_threshold(limit):
    names = ("all_gather", "gather", "scatter", "broadcast")
    cases = [Case(name, (1, more), dtype="int8") for name in names for more in (-1, 0, 1)]
    for size in (2, 3):
        harness.run(check, size, cases, SEGMENT, settings=[("RINGCOMM_CMA_BYTES", str(limit))])


PART = 128 << 10  # of a copy through a buffer: cma.cpp
PAGE = 4096


def placed(values, place):
    """Return a copy of an array of bytes that begins at this place in a page."""
    memory = np.zeros(len(values) + 2 * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + place
    memory[begin : begin + len(values)] = values
    return memory[begin : begin + len(values)]


def root_blocks(comm, lengths, shift):
    for length in lengths:
        block = filled(0, length, "uint8")
        received = placed(block if comm.rank == 0 else np.zeros(length, np.uint8), PAGE - 8 + shift * comm.rank)
        comm.broadcast(received)
        assert comm._transport.path()[0] == "cma"
        assert_same(received, block)
        both = placed(filled(0, 2 * length, "uint8"), 40)
        received = placed(np.zeros(length, np.uint8), (40 + length + shift) % PAGE)  # rank 1 reads both[length:]
        comm.scatter(both.reshape(2, length) if comm.rank == 0 else None, out=received)
        assert comm._transport.path()[0] == "cma"
        assert_same(received, both[comm.rank * length :][:length])


# A target 1 to 15 bytes beyond the source, by their places in a page, is copied through a buffer.
@pytest.mark.parametrize("shift", [0, 5, 15, 16])
def test_two_ranks_read_long_blocks_of_the_root_in_parts(shift):
    lengths = [PAGE, PART - 1, PART, PART + 1, 2 * PART + 5, LAST - 1, LAST, LAST + 1, 3 * LAST + 5]
    harness.run(root_blocks, 2, lengths, shift, settings=COPIED)


def in_groups(comm, cases):
    group = comm.split(comm.rank % 2, key=-comm.rank)
    for case in cases:
        start(group, case, SEGMENT)()
    group.close()


def test_groups_copy_from_their_own_members():
    harness.run(in_groups, 4, [case for case in pairwise(AXES, seed=3) if case.length[0]], settings=COPIED)


@pytest.mark.ranks(3, env=dict(COPIED))
def test_a_mismatch_leaves_the_outputs_untouched(comm):
    odd = comm.rank == comm.size - 1
    x, out = filled(comm.rank, 5000 + odd, "int32"), np.zeros((comm.size, 5000 + odd), np.int32)
    for call in (comm.all_gather, comm.gather):
        raised(MismatchError, lambda call=call: call(x, out=out))
        assert not out.any()
    check_usable(comm)


# --- CMA is forbidden ------------------------------------------------------------------------------------------------


def forbid():
    """Make process_vm_readv on other processes fail in this thread from now on."""
    sandbox.deny("process_vm_readv", unless_first=os.getpid())


def gathered(comm, x):
    out = comm.all_gather(x)
    assert_same(out, np.stack([filled(rank, x.size, x.dtype.name) for rank in range(comm.size)]))


@pytest.mark.ranks(3, env=dict(COPIED), fresh=True)
def test_the_world_does_not_use_cma_if_one_rank_may_not_read(comm):
    if comm.rank == 1:
        forbid()
    for length in (10, 5000, 3_000_001):
        gathered(comm, filled(comm.rank, length, "float32"))


def forbidden_later(comm):
    """The error also proves that the call before used CMA."""
    x = filled(comm.rank, 5000, "float32")
    gathered(comm, x)
    if comm.rank == 1:
        forbid()
    return str(raised(RingcommError, lambda: comm.all_gather(x)))


def test_a_rank_that_may_no_longer_read_is_an_error_on_every_rank():
    found, _ = survivors_of(forbidden_later, 3, settings=COPIED)
    assert len(found) == 3
    for answer in found.values():
        assert answer.startswith("rank 1 cannot read the memory of rank "), answer
        assert "Operation not permitted" in answer


def leaving_while_it_is_read(comm):
    """Rank 1 times out while rank 0 reads its array, and overwrites the array."""
    x = np.ones(1 << 24)
    out = np.zeros((2, 1 << 24))
    try:
        comm.gather(x, out, timeout=0.01 if comm.rank == 1 else None)
    except RingcommError:
        x.fill(9)
        return
    assert comm.rank == 1 or (out[1] == 1).all(), "rank 0 returned data read after rank 1 had left"


@pytest.mark.slow
def test_data_read_after_its_owner_has_left_is_discarded():
    assert survivors_of(leaving_while_it_is_read, 2, settings=COPIED)[0] == dict.fromkeys(range(2))
