"""Fixtures of the tests of calls."""

import pytest

import harness
from cases.between_hosts import run_on


@pytest.fixture(params=[*harness.WORLDS, "two hosts"])
def run(request):
    """Return a function that calls `fn(comm, *args)` on two ranks."""
    if request.param == "two hosts":
        return lambda fn, *args: run_on("01", fn, *args)
    return lambda fn, *args: harness.run(fn, 2, *args, world=request.param)
