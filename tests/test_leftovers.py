"""Runs after all other tests (conftest.py)."""

import time

import harness


def test_nothing_is_left_behind(footprint_before):
    harness.stop_helpers()
    deadline = time.monotonic() + 5
    while left := harness.footprint() - footprint_before:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.05)  # what was killed takes a moment to go
