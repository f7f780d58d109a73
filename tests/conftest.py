"""Fixtures of all tests. After the last nothing may be left behind."""

import gc
import multiprocessing
import os
import signal

import pytest

import harness
from ringcomm.devices import emulated

os.environ["RINGCOMM_TUNING"] = ""  # what somebody has tuned on this machine
os.environ.pop("PYTHONUNBUFFERED", None)  # users have it unset
os.environ[harness.MARK] = str(os.getpid())
# What a shell starts in the background ignores SIGINT, and so would every process of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
multiprocessing.set_forkserver_preload(["preload"])


@pytest.fixture(params=harness.WORLDS)
def world(request):
    """Where the ranks live: the argument `world` of harness.run."""
    return request.param


@pytest.fixture
def streams_as_on_a_gpu(monkeypatch):
    """Let calls return when they are launched."""
    monkeypatch.setattr(emulated.EmulatedDevice, "blocking", False)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """What killed processes cannot remove lies where pytest does."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    before = harness.footprint()
    yield
    gc.collect()  # the traceback of a failed call may hold the frames that hold it: that is garbage, not left behind
    harness.stop_helpers()
    assert not harness.left_behind(before)
