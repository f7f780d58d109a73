"""Atomic file writes, and folders that nobody else can write to."""

import os
import secrets
import shutil
import stat
from errno import EISDIR
from pathlib import Path

from ringcomm.errors import ArgumentError

__all__ = ["check_writable", "private_folder", "write_atomic"]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folders: no reader, concurrent writer or crash sees a partial file."""
    if _is_device(path):
        path.write_bytes(data)
        return
    path = path.resolve()  # keep a symbolic link
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        _create(part, data)
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
        _create(part, b"")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    part.unlink()


def private_folder(folder: Path) -> Path:
    """Return the folder, created for this user alone if it is missing.

    Raises ArgumentError if another user owns it, or could write to it or replace it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    facts, above = folder.lstat(), folder.parent.stat()
    if not stat.S_ISDIR(facts.st_mode):
        reason = "it is no folder, but perhaps a link"
    elif facts.st_uid != os.geteuid():
        reason = f"it belongs to user {facts.st_uid}, not to user {os.geteuid()}"
    elif facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"other users can write to it (mode {stat.S_IMODE(facts.st_mode):o})"
    elif above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        reason = f"other users can replace it: {folder.parent} is writable for all and has no sticky bit"
    else:
        return folder
    raise ArgumentError(f"{folder}: {reason}")


def _is_device(path: Path) -> bool:
    """Return whether the file cannot be replaced: a pipe, or /dev/stdout, which may be a file that a shell has open."""
    special = path.exists() and not (path.is_file() or path.is_dir())
    return special or path.absolute().parts[:2] in (("/", "dev"), ("/", "proc"))


def _part(path: Path) -> Path:
    return path.with_name(f".ringcomm-{secrets.token_hex(8)}")


def _create(path: Path, data: bytes) -> None:
    """Write a new file, never through a link that somebody has planted."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(data)
