"""What tests leave behind: processes, threads, descriptors and files."""

import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

from ringcomm.bench.job import shared_files

SEGMENTS: set[int] = set()  # of GPU memory: ringcomm keeps them until the process ends, and conftest.py frees them
MARK = "PYTEST_OF_RINGCOMM"  # with the id of this process, in the environment of every process that the tests start


def footprint():
    """Count the processes, threads, descriptors and files of this process and its children."""
    return Counter([*processes(), *threads(), *descriptors(), *files()])


def left_behind(before, seconds=5):
    """Return the resources that were not there before and are not released in time."""
    deadline = time.monotonic() + seconds
    while left := footprint() - before:
        if time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.05)  # killed processes take a moment; tests that run at the same time share files
    return []


def processes():
    mark = f"{MARK}={os.getpid()}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (path / "environ").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if marked or parent == os.getpid():
            yield f"process {path.name}: {command}"


def threads():
    yield from (f"thread {thread.name}" for thread in threading.enumerate())
    for path in Path("/proc/self/task").glob("*/comm"):
        if (name := path.read_text().strip()).startswith("ringcomm"):
            yield f"native thread {name}"


def descriptors():
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:
            continue  # the one that lists this folder
        if "/matplotlib/" not in target:  # it keeps its fonts open
            yield "descriptor " + re.sub(r"\d+", "N", target)


def files():
    """Yield files that no process has mapped: other tests may run at the same time."""
    mapped = {path for process in Path("/proc").glob("[0-9]*") for path in shared_files(int(process.name))}
    yield from (f"file {path}" for path in Path("/dev/shm").iterdir() if str(path) not in mapped)
