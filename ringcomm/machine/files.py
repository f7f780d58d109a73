"""Atomic file writes."""

import os
import shutil
import threading
from errno import EISDIR
from pathlib import Path

__all__ = ["check_writable", "write_atomic"]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folders: no reader, concurrent writer or crash sees a partial file."""
    if _is_device(path):
        path.write_bytes(data)
        return
    path = path.resolve()  # keep a symbolic link
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        part.write_bytes(data)
        if path.exists():
            shutil.copymode(path, part)
        try:
            part.replace(path)
        except OSError:  # a bind-mounted file, as in containers
            path.write_bytes(data)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError if `write_atomic` could not write a file in its existing folder."""
    if _is_device(path):
        return
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    part = _part(path)
    try:
        part.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    part.unlink()


def _is_device(path: Path) -> bool:
    """Return whether the file cannot be replaced: a pipe, or /dev/stdout, which may be a file that a shell has open."""
    special = path.exists() and not (path.is_file() or path.is_dir())
    return special or path.absolute().parts[:2] in (("/", "dev"), ("/", "proc"))


def _part(path: Path) -> Path:
    return path.with_name(f".ringcomm-{os.getpid()}-{threading.get_ident()}")
