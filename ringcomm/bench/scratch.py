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
FRESH = 60.0  # seconds within which a new folder is locked, however slow the machine


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed in the end; it is locked, and the lock ends with this process."""
    _remove_unlocked()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        descriptor = _locked(folder)
        try:
            yield Path(folder)
        finally:
            os.close(descriptor)


def _remove_unlocked() -> None:
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # it is somebody else's, locked, or gone
            if time.time() - folder.stat().st_mtime > FRESH:
                descriptor = _locked(folder)
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(descriptor)


def _locked(folder: str | Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
