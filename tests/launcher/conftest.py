"""Fixtures of the tests of launchers."""

from contextlib import closing

import pytest

from harness.nodes import Job


@pytest.fixture
def job(tmp_path):
    """A job of two nodes."""
    with closing(Job(tmp_path, 2)) as job:
        yield job
