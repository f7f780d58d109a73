"""Runs after all other tests (conftest.py)."""

import gc
import time

import harness


def test_nothing_is_left_behind(footprint_before):
    gc.collect()  # the traceback of a failed call may hold the frames that hold it: that is garbage, not left behind
    harness.stop_helpers()
    deadline = time.monotonic() + 5
    while left := harness.footprint() - footprint_before:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.05)  # what was killed takes a moment to go
