"""Fixtures of the tests of stores."""

import threading
import uuid

import pytest

from harness.failures import until


@pytest.fixture
def job():
    return uuid.uuid4().hex


@pytest.fixture
def no_thread_is_left():
    before = threading.active_count()
    yield
    until(lambda: threading.active_count() == before, "the end of all threads")
