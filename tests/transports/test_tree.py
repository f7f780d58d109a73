"""Small calls of many ranks through the tree, on a simulated machine: values, mismatches, deaths, the contract."""

import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import harness
from harness.failures import check_usable, mismatch_of, outcomes, raised
from ringcomm import ArgumentError, Config, PeerLost
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.testing import check_transport, connect_threads
from ringcomm.transports import shm

TOPOLOGY = "2x2x4"  # the ranks 0 to 3 share a cache, 0 to 7 a node
SETTINGS = [("RINGCOMM_TOPOLOGY", TOPOLOGY)]
SIZE = 16


def path(comm):
    return comm._transport.path()[0]


def values(comm):
    in_tree = 0
    for n in range(1, 60):  # beyond what a relay holds
        draw = np.random.default_rng(n).standard_normal((comm.size, n)).astype(np.float32)
        expected = draw[0].copy()
        for row in draw[1:]:
            expected += row  # in rank order
        assert comm.all_reduce(draw[comm.rank].copy()).tobytes() == expected.tobytes()
        in_tree += path(comm) == "tree"
        assert comm.all_reduce(draw[comm.rank].copy(), async_op=True).wait().tobytes() == expected.tobytes()
        assert comm.all_gather(draw[comm.rank]).tobytes() == draw.tobytes()
        comm.broadcast(draw[0], root=n % comm.size)
        comm.reduce(draw[0])
        comm.barrier()
    assert in_tree > 20  # a rank that is late reads the records of all


def test_sums_in_the_tree_are_those_of_rank_order():
    harness.run(values, SIZE, settings=SETTINGS)


def differ(comm, odd):
    x = np.ones(3, np.float32)
    for _ in range(3):
        comm.all_reduce(x)
    before = x.copy()
    error = mismatch_of(comm, lambda: comm.barrier() if comm.rank in odd else comm.all_reduce(x))
    assert x.tobytes() == before.tobytes()
    check_usable(comm)
    return str(error)


@pytest.mark.parametrize("odd", [[0], [4], [8, 13], [15]], ids=["root", "inner", "two", "leaf"])
def test_a_mismatch_in_the_tree_is_named_on_every_rank(odd):
    found = harness.run(differ, SIZE, odd, settings=SETTINGS)
    assert len({*found}) == 1
    assert f"\n  {format_ranks(odd)}: barrier()" in found[0]


def call_until_one_dies(comm, victim):
    x = np.zeros(1, np.float32)
    for _ in range(20):
        comm.all_reduce(x)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def call_again_and_again():
        while True:
            comm.all_reduce(x)

    return raised(PeerLost, call_again_and_again).rank


@pytest.mark.parametrize("victim", [0, 4, 15])
def test_a_death_in_the_tree_is_named_by_every_survivor(victim):
    with harness.world(SIZE, settings=SETTINGS) as pool:
        answers = {rank: answer for rank, answer, _ in outcomes(pool, call_until_one_dies, victim)}
    assert isinstance(answers.pop(victim), ConnectionError)
    assert {*answers.values()} == {victim}


def connect_simulated(topology, rank, size, store, config):
    return shm.connect(rank, size, store, replace(config, topology=topology))


@pytest.mark.parametrize(
    ("topology", "size"), [(TOPOLOGY, SIZE), pytest.param("2x4x8", 64, marks=pytest.mark.exhaustive)]
)
def test_ranks_in_a_tree_keep_the_contract(topology, size):
    check_transport(partial(connect_threads, partial(connect_simulated, topology)), [size])


def test_a_topology_with_too_little_room_is_refused():
    with pytest.raises(ArgumentError, match=r"topology \(RINGCOMM_TOPOLOGY\): expected room for 4 ranks, got '1x1x3'"):
        connect_threads(partial(connect_simulated, "1x1x3"), 4)


@pytest.mark.parametrize("wrong", ["", "2x4", "0x1x1", "2x4x8x2", "axbxc", 8])
def test_a_topology_is_three_numbers(wrong):
    with pytest.raises(ArgumentError, match=r"topology: expected NUMA nodes x caches x ranks"):
        Config(topology=wrong)
