"""Ranks that `ringcomm run` starts on several hosts: values of every kind, many starts, and what takes long."""

import numpy as np
import pytest
import test_large

import harness
import ringcomm
from cases.between_hosts import ROUNDED
from cases.reference import COMBINATIONS
from cases.soak import soak
from harness.hosts import why_no_hosts
from ringcomm.machine.memory import available, mib

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]
STARTS = 1000


def test_ten_thousand_mixed_random_calls_are_correct():
    """Sums that are rounded have their own test: between hosts their order is another one."""
    exact = [each for each in COMBINATIONS if each not in ROUNDED]
    with harness.world("0011", "ringcomm run") as pool:
        done = pool.run(soak, (10_000, 5, exact), limit=1200)
    assert sum(checks for _, checks in done) > 2 * 10_000


def test_a_message_may_be_longer_than_2_gib():
    needed = 2 * test_large.NEEDED  # arrays, and what arrives of them
    if available().bytes < needed:
        pytest.skip(f"needs {mib(needed)} of memory: {available()}")
    with harness.world("01", "ringcomm run") as pool:
        pool.run(test_large.large, (), limit=600)


def start_often(_, times):
    for number in range(times):
        with ringcomm.init(timeout=20) as comm:
            x = np.full(3, comm.rank + 1.0)
            comm.all_reduce(x)
            assert (x == 10).all(), f"start {number}"


def test_the_ranks_of_a_job_start_a_thousand_times():
    with harness.world("0011", "ringcomm run") as pool:
        pool.run(start_often, (STARTS,), limit=600)
