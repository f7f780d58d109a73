"""Mixed random calls: sizes, dtypes, collectives, groups, symmetric buffers, messages, all at once."""

import pytest

import harness
import ringcomm
from soak import RANKS, soak


@pytest.mark.slow
def test_two_thousand_mixed_random_calls_are_correct(world):
    done = ringcomm.launch(soak, RANKS, world=world, args=(2000, 1), timeout=harness.OPERATION)
    assert sum(checks for _, checks in done) > 2 * 2000


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_a_hundred_thousand_mixed_random_calls_are_correct(world):
    done = ringcomm.launch(soak, RANKS, world=world, args=(100_000, 3), timeout=60)
    assert sum(checks for _, checks in done) > 2 * 100_000
