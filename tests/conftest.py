"""Fixtures of all tests, and the check that the session leaves nothing behind."""

import gc
import multiprocessing
import os
import signal

import pytest

import harness
from ringcomm.devices import emulated

os.environ["RINGCOMM_TUNING"] = ""  # ignore this machine's tuning file
os.environ.pop("PYTHONUNBUFFERED", None)  # as for most users
os.environ[harness.MARK] = str(os.getpid())
# A shell starts background jobs with SIGINT ignored, and every process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
multiprocessing.set_forkserver_preload(["preload"])


@pytest.fixture(params=harness.WORLDS)
def world(request):
    """Where the ranks live: the argument `world` of harness.run."""
    return request.param


@pytest.fixture
def streams_as_on_a_gpu(monkeypatch):
    """Make calls return once they are launched."""
    monkeypatch.setattr(emulated.EmulatedDevice, "blocking", False)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """Put temporary files, which killed processes leave behind, into the folder of pytest."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    before = harness.footprint()
    yield
    gc.collect()  # tracebacks of failed calls and their frames may form cycles, which are no leak
    harness.stop_helpers()
    assert not harness.left_behind(before)
