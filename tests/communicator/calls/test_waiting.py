"""Waiting: placement keeps the user's affinity masks, and a disturbance does not leave ranks sleeping in turn."""

import os
import resource
import time

import numpy as np
import pytest

import harness

CORES = os.sched_getaffinity(0)
CALLS = 100


def traffic_on(comm, cores):
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


@pytest.mark.parametrize("cores", [CORES, {min(CORES)}], ids=["all", "one"])
def test_a_rank_keeps_the_affinity_mask_that_the_user_gave_it(cores):
    harness.run(traffic_on, 2, cores)


def sleeps_after_a_disturbance(comm):
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
    return fewest


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_ranks_do_not_sleep_in_turn_after_a_disturbance():
    assert max(harness.run(sleeps_after_a_disturbance, 2)) < CALLS // 4
