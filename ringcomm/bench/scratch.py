"""Folders for the files of a job: its log, and where its ranks meet. Those of a bench that was killed are removed."""

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
MARK = ".in-use"  # a file that is locked as long as the bench lives
FRESH = 60.0  # seconds within which a new one is locked, however slow the machine


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed in the end."""
    _remove_those_of_the_dead()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with _locked(folder / MARK, os.O_CREAT):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # another bench may be at it


def _remove_those_of_the_dead() -> None:
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # it is in use, or gone
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
