"""Ranks that `ringcomm run` starts on several hosts: values of every kind, many starts, and what takes long."""

import numpy as np
import pytest
import test_large

import harness
import ringcomm
from cases.between_hosts import ROUNDED, algorithms, check_rounded
from cases.reference import COMBINATIONS
from cases.soak import soak
from harness import JOB
from harness.hosts import several_hosts, why_no_hosts
from harness.worlds import start_on
from ringcomm.machine.memory import available, mib
from ringcomm.types import REDUCING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]
STARTS = 1000
LAYOUTS = (
    *("01", "001", "0011", "00011", "000111", "0001"),
    *("012", "0012", "00012", "00112", "001122", "000112", "0001122", "00011122", "000111222"),
    *("0123", "00112233", "0001112223", "000111222333", "01233", "0112333"),
)


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


PROGRAM = """
import numpy as np
import ringcomm
with ringcomm.init(timeout=20) as comm:
    x = np.full(3, comm.rank + 1.0)
    comm.all_reduce(x)
    assert (x == 10).all()
"""


def test_a_thousand_jobs_start_and_end(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with several_hosts(2) as hosts:
        for number in range(STARTS):
            launchers = start_on(hosts, (2, 2), "ringcomm run", program)
            for launcher in launchers:
                out, _ = launcher.communicate(timeout=JOB)
                assert (launcher.returncode, out) == (0, ""), f"job {number}"


def start_often(_, times):
    for number in range(times):
        with ringcomm.init(timeout=20) as comm:
            x = np.full(3, comm.rank + 1.0)
            comm.all_reduce(x)
            assert (x == 10).all(), f"start {number}"


def test_the_ranks_of_a_job_start_a_thousand_times():
    with harness.world("0011", "ringcomm run") as pool:
        pool.run(start_often, (STARTS,), limit=600)


def reduce_by_all(_, layout, calls):
    for name, collectives in algorithms(layout, REDUCING):
        with ringcomm.init(config=ringcomm.Config(timeout=60, algorithm=name)) as comm:
            check_rounded(comm, layout, collectives, name, calls)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_of_every_dtype_is_computed_as_the_schedule_defines(layout):
    calls = [(count, kind) for count in (4, 9001) for kind in COMBINATIONS]
    with harness.world(layout, "ringcomm run") as pool:
        pool.run(reduce_by_all, (layout, calls), limit=1200)
