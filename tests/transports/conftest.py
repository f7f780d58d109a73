"""Fixtures of the tests of GPUs on several hosts."""

import pytest

from cases.between_hosts import CHUNK
from ringcomm.transports.staged import staging


@pytest.fixture
def small_chunks(monkeypatch):
    """Let small arrays be staged in several chunks."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
