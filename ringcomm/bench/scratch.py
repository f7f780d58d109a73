"""Folders for the files of a job: its log and its socket. Folders left by a killed bench are removed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["scratch_folder"]

PREFIX = "ringcomm-bench-"
MARK = ".in-use"  # locked as long as the bench runs
FRESH = 60.0  # seconds in which even a slow machine locks a new folder


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder and remove it at the end."""
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with _locked(folder / MARK, os.O_CREAT):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # another bench may be removing it


def _remove_stale() -> None:
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # in use, or removed
            facts = mark.stat()
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > FRESH:
                with _locked(mark):
                    shutil.rmtree(mark.parent)


@contextmanager
def _locked(mark: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
