"""Every collective at every size, with roots, counts, places of the result and odd addresses, against reference.py."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import harness
from cases.collectives import PLANS, Case, pairwise, start
from cases.reference import assert_same, filled
from ringcomm import ArgumentError, Config

# Segments of a page in one world, of the default length in the other: the first has hundreds of chunks.
PAGE = 4096
SMALL = {"RINGCOMM_ARENA_BYTES": 1 << 18, "RINGCOMM_SEGMENT_BYTES": PAGE, "RINGCOMM_ONE_SHOT_BYTES": 512}
# How ranks access each other's arrays: threads of one process could always use them directly.
PATHS = {
    "staged": {"RINGCOMM_DIRECT_BYTES": 1 << 60},
    "direct": {"RINGCOMM_DIRECT_BYTES": 1},
    "copied by the kernel": {"RINGCOMM_DIRECT_BYTES": 1 << 60, "RINGCOMM_CMA_BYTES": 1},
}

AXES = {
    "collective": list(PLANS),
    "length": [(0, 0), (0, 1), (0, 7), (1, 0), (1, 1), (3, 5)],
    "row": [(), (3,), (2, 1, 2)],
    "dtype": ["bool", "int8", "bfloat16", "float32", "int64", "complex128"],
    "place": ["default", "out", "in place"],
    "async_op": [False, True],
    "root": [0, 1, -1],
    "counts": ["none", "even", "uneven", "zeros"],
    "offset": [0, 1, 8],
}


def check(comm, cases, segment):
    for case in cases:
        start(comm, case, segment)()


@pytest.fixture(params=PATHS)
def small_segments(request, monkeypatch):
    for name, value in {**SMALL, **PATHS[request.param]}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.usefixtures("small_segments")
def test_collectives_of_threads_are_exact_with_small_segments(size):
    axes = {**AXES, "length": [*AXES["length"], (17, 5)]}
    harness.run(check, size, pairwise(axes, seed=size), PAGE, world="threads")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_of_processes_are_exact(size):
    harness.run(check, size, pairwise(AXES, seed=10 + size), Config().segment_bytes)


@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.usefixtures("small_segments")
def test_collectives_of_many_threads_are_exact(size):
    few = {"length": [(0, 1), (3, 5)], "dtype": ["int8", "float32"], "root": [1, -1], "row": [()], "offset": [0]}
    harness.run(check, size, pairwise({**AXES, **few}, seed=size), 256, world="threads")


@pytest.mark.parametrize("collective", PLANS)
def test_the_shortest_and_longest_arrays_alternate(collective, world):
    lengths = [(0, 1), (3, 1), (0, 0), (2, 0), (0, 4), (1, 1)]
    cases = [Case(collective, length, salt=i, async_op=i % 2 > 0) for i, length in enumerate(lengths * 4)]
    harness.run(check, 3, cases, Config().segment_bytes // 4, world=world)


@pytest.mark.ranks(1, 3)
def test_an_array_without_axes_is_one_element(comm):
    x = np.array(comm.rank + 1.0)
    assert comm.all_reduce(x) is x
    assert_same(x, np.array(comm.size * (comm.size + 1) / 2))
    assert_same(comm.broadcast(np.array(comm.rank), root=comm.size - 1), np.array(comm.size - 1))
    assert_same(comm.all_gather(np.array(comm.rank)), np.arange(comm.size))
    for divide in (comm.reduce_scatter, comm.all_to_all, lambda x: comm.all_gather(x, counts=[1] * comm.size)):
        with pytest.raises(ArgumentError):
            divide(x)
    comm.barrier()


@pytest.mark.ranks(2)
def test_an_output_on_a_rank_without_a_result_is_ignored(comm):
    junk = np.zeros(1, np.int8)
    root = comm.rank == 0
    x = filled(comm.rank, 5, "float32")
    out = np.empty((comm.size, 5), np.float32) if root else junk
    assert comm.gather(x, out=out) is (out if root else None)
    assert comm.reduce(x, out=out[0] if root else junk) is not junk
    assert not junk.any()


@pytest.mark.ranks(2)
def test_concurrent_calls_of_the_threads_of_a_rank_are_serialized(comm):
    def call(_):
        for turn in range(25):
            x = np.ones(40_000, np.int16)
            comm.all_reduce(x) if turn % 2 else comm.all_reduce(x, async_op=True).wait()
            assert_same(x, np.full(40_000, comm.size, np.int16))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))


def barriers(comm, counter):
    for step in range(1, 50):
        counter.append(comm.rank)  # atomic, under the GIL
        comm.barrier(async_op=True).wait() if step % 2 else comm.barrier()
        assert len(counter) >= step * comm.size
        comm.barrier()


@pytest.mark.parametrize("size", [1, 2, 5, 33])
def test_no_rank_leaves_a_barrier_before_all_have_entered(size):
    harness.run(barriers, size, [], world="threads")
