"""Mixed random calls: sizes, dtypes, collectives, groups, symmetric buffers, messages, all at once."""

import pytest

import harness
import ringcomm
from cases.between_hosts import ROUNDED, run_on
from cases.reference import COMBINATIONS
from cases.soak import RANKS, soak


@pytest.mark.slow
def test_two_thousand_mixed_random_calls_are_correct(world):
    done = ringcomm.launch(soak, RANKS, world=world, args=(2000, 1), timeout=harness.OPERATION)
    assert sum(checks for _, checks in done) > 2 * 2000


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_a_hundred_thousand_mixed_random_calls_are_correct(world):
    done = ringcomm.launch(soak, RANKS, world=world, args=(100_000, 3), timeout=60)
    assert sum(checks for _, checks in done) > 2 * 100_000


def soak_between_hosts(layout, calls):
    """Leave out sums that are rounded: between hosts their order is another one."""
    exact = [each for each in COMBINATIONS if each not in ROUNDED]
    done = run_on(layout, soak, calls, 2, exact)
    assert sum(checks for _, checks in done) > 2 * calls


@pytest.mark.slow
def test_a_thousand_mixed_random_calls_between_hosts_are_correct():
    soak_between_hosts("0011", 1000)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["0011", "0001", "0123"])
def test_ten_thousand_mixed_random_calls_between_hosts_are_correct(layout):
    soak_between_hosts(layout, 10_000)
