"""Fixtures of the tests of GPUs on several hosts."""

import pytest

from cases.between_hosts import CHUNK
from ringcomm.devices import emulated
from ringcomm.transports import staging


@pytest.fixture
def small_chunks(monkeypatch):
    """Let small arrays be staged in several chunks."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def no_peer_access(monkeypatch):
    def refuse(*_):
        raise OSError("peer access is not supported between these two devices")

    monkeypatch.setattr(emulated.EmulatedDevice, "open", refuse)
