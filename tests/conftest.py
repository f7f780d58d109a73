"""Fixtures of all tests, and the check that the session leaves nothing behind."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections import Counter, defaultdict
from multiprocessing import forkserver
from pathlib import Path

import pytest

import harness
from harness import leftovers, pools
from harness.rank import folders
from ringcomm.devices import emulated
from ringcomm.transports.cuda import deferred_free, messages

TESTS = Path(__file__).parent
sys.path += [*folders(), str(TESTS.parent / "benchmarks")]
os.environ["RINGCOMM_TUNING"] = ""  # ignore this machine's tuning file
os.environ["OMP_NUM_THREADS"] = "1"  # as ranks and tests share the cores, the threads of torch would wait in loops
# As for most users; without its bytecode each process would compile ringcomm anew.
for variable in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(variable, None)
# Let processes keep memory that they free: else the page faults of large arrays take as long as the calls on them.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
os.environ[leftovers.MARK] = str(os.getpid())
# A shell starts background jobs with SIGINT ignored, and every process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
multiprocessing.set_forkserver_preload(["harness.preload"])


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would run files of few tests last, also where those are slow


def pytest_collection_modifyitems(items):
    """Mix the folders, whose tests wait or compute, so that the workers share the cores at any time.

    In each folder begin with the files of most slow tests, so that all workers end with short ones.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    folders = defaultdict(list)
    for path in sorted(tests, key=lambda path: (slow[path], tests[path]), reverse=True):
        folders[path.relative_to(TESTS).parts[0]].append(path)
    when = {path: (n + 0.5) / len(paths) for paths in folders.values() for n, path in enumerate(paths)}
    items.sort(key=lambda item: when[item.path])


def pytest_collection_finish():
    """Leave what is imported and collected out of garbage collections, of which each would take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=harness.WORLDS)
def world(request):
    """Where the ranks live: the argument `world` of harness.run."""
    return request.param


@pytest.fixture
def streams_as_on_a_gpu(monkeypatch):
    """Make calls return once they are launched."""
    monkeypatch.setattr(emulated.EmulatedDevice, "blocking", False)


@pytest.fixture
def no_peer_access(monkeypatch):
    def refuse(*_):
        raise OSError("peer access is not supported between these two devices")

    monkeypatch.setattr(emulated.EmulatedDevice, "open", refuse)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """Put temporary files, which killed processes leave behind, into the folder of pytest."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("temporary"))
    with contextlib.chdir(TESTS):  # where the fork server finds what it is to import
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    before = leftovers.footprint()
    yield
    for kept in (
        deferred_free._kept,
        messages._kept,
        messages._spare,
    ):  # by closed communicators, until the process ends
        kept.clear()
    for address in leftovers.SEGMENTS:
        emulated.device.gpu.free(address)
    gc.collect()  # tracebacks of failed calls and their frames may form cycles, which are no leak
    pools.stop_helpers()
    assert not leftovers.left_behind(before)
