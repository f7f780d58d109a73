"""Groups made by split: their members, their concurrent use, and that they leave nothing behind."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from test_symmetric import shared_bytes

import harness
from cases.collectives import PLANS, Case, start
from cases.reference import assert_same
from harness.failures import until
from ringcomm import Aborted, ArgumentError, Config, RingcommError, native
from ringcomm.transports import shm

# The groups that (color, key) form from four ranks: the old ranks of each group, in the order of the new ones.
SPLITS = {
    "one group": (lambda rank: (0, 0), [[0, 1, 2, 3]]),
    "pairs": (lambda rank: (rank // 2, 0), [[0, 1], [2, 3]]),
    "turned around": (lambda rank: (7, -rank), [[3, 2, 1, 0]]),
    "ties by rank": (lambda rank: (0, rank % 2), [[0, 2, 1, 3]]),
    "each alone": (lambda rank: (rank, 0), [[0], [1], [2], [3]]),
    "some left out": (lambda rank: (None if rank == 1 else 5, 0), [[0, 2, 3]]),
    "all left out": (lambda rank: (None, rank), []),
    "unequal": (lambda rank: (np.int64(rank > 0), np.int8(rank == 1)), [[0], [2, 3, 1]]),
    "large colors": (lambda rank: (2**62 * (-1) ** rank, 2**62 - rank), [[2, 0], [3, 1]]),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.ranks(4)
def test_split_forms_groups_by_color_and_key(comm, name):
    choose, groups = SPLITS[name]
    group = comm.split(*choose(comm.rank))
    members = next((members for members in groups if comm.rank in members), None)
    if members is None:
        assert group is None
    else:
        assert (group.rank, group.size) == (members.index(comm.rank), len(members))
        assert group.timeout == comm.timeout
        assert_same(group.all_gather(np.array(comm.rank)), np.array(members))
        for salt, collective in enumerate(PLANS):
            for length in ((0, 3), (1, 5)):
                start(group, Case(collective, length, root=-1, salt=salt), Config().segment_bytes)()
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        x = np.empty(20_000)
        assert group.sendrecv(np.full(20_000, comm.rank + 0.5), right, x, left) == left
        assert_same(x, np.full(20_000, members[left] + 0.5))
        group.close()
    comm.barrier()


@pytest.mark.ranks(4, 7, world="threads")
def test_groups_are_split_again_and_outlive_their_parents(comm):
    """Halves of halves, down to single ranks, each used after its parent is closed."""
    group, members = comm.split(0), list(range(comm.size))
    while len(members) > 1:
        half = group.rank * 2 // group.size
        smaller = group.split(half)
        members = [rank for new, rank in enumerate(members) if new * 2 // len(members) == half]
        group.close()
        group = smaller
        assert_same(group.all_gather(np.array(comm.rank)), np.array(members))
        x = np.full(100_000, comm.rank)
        assert_same(group.all_reduce(x), np.full(100_000, sum(members)))
    with pytest.raises(ArgumentError, match="closed"):
        smaller.close() or smaller.barrier()


@pytest.mark.ranks(2)
def test_each_thread_may_have_a_group_of_its_own(comm):
    groups = [comm.split(0) for _ in range(4)]

    def use(group, value):
        for turn in range(50):
            x = np.full((1, 50_000)[turn % 2], value)
            assert_same(group.all_reduce(x), np.full(x.shape, comm.size * value))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, groups, range(4)))
    for group in groups:
        group.close()


def footprint():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def is_back_to(before):
    return all(left <= was for left, was in zip(footprint(), before, strict=True))


@pytest.mark.ranks(2, world="processes")
def test_many_splits_leave_no_memory_descriptor_or_thread(comm):
    def use():
        group = comm.split(0, key=-comm.rank)
        group.all_reduce(np.ones(1000), async_op=True).wait()
        work = group.send(np.ones(100_000), group.rank ^ 1, async_op=True)
        group.recv(np.ones(100_000), group.rank ^ 1)
        work.wait()
        group.close()

    use()
    gc.collect()  # what an earlier test left in this process
    comm.barrier()
    shared, before = shared_bytes(), footprint()
    comm.barrier()
    for _ in range(40):
        use()
    comm.barrier()
    assert shared_bytes() - shared < 2 * Config().sub_arena_bytes * comm.size
    comm.barrier()
    # The kernel lists a thread for a moment after it was joined.
    until(lambda: is_back_to(before), f"descriptors and threads as before: {before}")


class FailingToOpen:
    """The native core, but opening a group raises a Python error."""

    def __getattr__(self, name):
        return getattr(native.lib, name)

    def rc_sub_open(self, *_):
        raise OSError("no more descriptors")


@pytest.mark.parametrize("step", ["reserve", "open"])
@pytest.mark.ranks(3, world="processes")
def test_a_split_that_fails_on_one_rank_fails_on_all(comm, step):
    """Rank 1 fails with another error than RingcommError: all ranks raise, none waits."""
    patch = {
        "reserve": mock.patch.object(shm.memory, "require", side_effect=ValueError("not a number: " + "ü" * 1000)),
        "open": mock.patch.object(shm, "lib", FailingToOpen()),
    }[step]
    words = {"reserve": "rank 1: ValueError: not a number: üü", "open": "rank 1: OSError: no more descriptors"}[step]
    with patch if comm.rank == 1 else nullcontext(), pytest.raises(RingcommError) as caught:
        comm.split(None if comm.rank == 2 else 0)
    assert type(caught.value) is RingcommError  # not MemoryShortage
    assert str(caught.value).startswith(words)
    assert (caught.value.rank, caught.value.collective) == (1, "split")
    with comm.split(0) as group:
        assert_same(group.all_gather(np.array(comm.rank)), np.arange(3))


def interrupted(comm):
    def action():
        if comm.rank == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if comm.rank == 1 else Aborted) as caught:
        comm._router.run_on_all("split", action)
    comm.barrier()
    return str(caught.value)


def test_an_interrupt_of_one_rank_in_split_ends_it_on_all():
    assert harness.run(interrupted, 3) == ["rank 1: KeyboardInterrupt", "", "rank 1: KeyboardInterrupt"]


@pytest.mark.ranks(2)
def test_a_fact_that_is_too_long_to_exchange_is_refused(comm):
    if comm.rank == 1:
        with pytest.raises(
            ArgumentError, match="the arguments of split as JSON: expected at most 2048 bytes, got 3002"
        ):
            comm._transport.all_gather_facts("split", "x" * 3000)
    comm.barrier()
