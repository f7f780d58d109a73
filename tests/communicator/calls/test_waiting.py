"""Waiting: placement keeps the user's affinity masks, and a disturbance does not leave ranks sleeping in turn."""

import os
import resource
import threading
import time

import numpy as np
import pytest

import harness

CORES = os.sched_getaffinity(0)
CALLS = 100


@pytest.mark.parametrize("cores", [CORES, {min(CORES)}], ids=["all", "one"])
@pytest.mark.ranks(2, world="processes")
def test_a_rank_keeps_the_affinity_mask_that_the_user_gave_it(comm, cores):
    os.sched_setaffinity(0, cores)
    x = np.ones(4, np.float32)
    for _ in range(10):
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.002)  # the others spin in vain
        comm.all_reduce(x)
        comm.sendrecv(x, (comm.rank + 1) % comm.size, x.copy(), None)
    assert os.sched_getaffinity(0) == cores
    os.sched_setaffinity(0, CORES)  # these processes run the next test, too


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.ranks(2, world="processes")
def test_ranks_do_not_sleep_in_turn_after_a_disturbance(comm):
    x = np.ones(4, np.float32)
    fewest = CALLS
    for _ in range(10):  # other programs on this machine disturb as well
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.02)  # until the others sleep
        comm.all_reduce(x)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(CALLS):
            comm.all_reduce(x)
        fewest = min(fewest, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
    assert fewest < CALLS // 4


def count_beside_calls(comm):
    """Return the calls in which no other thread has run, though rank 1 was late."""
    x, out, large = np.ones(2), np.zeros(2), np.zeros(1 << 20)
    peer, counts, ended = 1 - comm.rank, [0], threading.Event()

    def run_beside():
        while not ended.wait(0.001):
            counts[0] += 1

    def recv_beside_a_large_one():
        open_calls = comm.recv(large, peer, tag=1, async_op=True), comm.send(large.copy(), peer, tag=1, async_op=True)
        comm.sendrecv(x, peer, out, peer)
        for call in open_calls:
            call.wait()

    calls = {
        "barrier": comm.barrier,
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather": lambda: comm.all_gather(np.ones(300)),  # between hosts by a program
        "sendrecv": lambda: comm.sendrecv(x, peer, out, peer),
        "beside a large message": recv_beside_a_large_one,
        "async": lambda: comm.all_reduce(x, async_op=True).wait(),
        "object": lambda: comm.all_gather_object(None),
    }
    beside, alone = threading.Thread(target=run_beside), []
    beside.start()
    for name, call in calls.items():
        comm.barrier()
        if comm.rank:
            time.sleep(0.1)
        counts[0] = 0
        call()
        if comm.rank == 0 and counts[0] < 4:
            alone.append(name)
    ended.set()
    beside.join()
    return alone


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_a_small_call_that_waits_lets_other_threads_run(hosts):
    """It keeps the GIL, but only until it has to wait."""
    with harness.world(hosts, "nodes") as pool:
        assert pool.run(count_beside_calls, ()) == [[], []]
