"""Atomic file writes, and folders that nobody else can write to."""

import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from errno import EISDIR, ELOOP, EPERM
from pathlib import Path

from ringcomm.errors import ArgumentError

__all__ = ["check_private", "check_writable", "create_atomic", "private_folder", "write_atomic"]

LINKS = 40  # one after another, as many as the kernel follows


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folders: no reader, concurrent writer or crash sees a partial file."""
    if _is_device(path):
        path.write_bytes(data)
        return
    path = _target(path)  # keep a symbolic link
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


def create_atomic(path: Path, data: bytes) -> bool:
    """Write a new file atomically, and create its folders. Return False if it exists: one of several writers wins."""
    if path.exists():  # as for most of many writers
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        _create(part, data)
        try:
            os.link(part, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no links
            _create(path, data)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def check_private(path: str, facts: os.stat_result, what: str) -> None:
    """Raise ArgumentError if others than this user and root can read the file with these facts."""
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or facts.st_uid not in (0, os.geteuid()):
        owner = f"owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o}"
        raise ArgumentError(f"other users can read {what} in {path} ({owner}): run chmod 600 {path}")


def check_writable(path: Path) -> None:
    """Raise OSError if `write_atomic` could not write a file in its existing folder."""
    if _is_device(path):
        return
    path = _target(path)
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    part = _part(path)
    try:
        _create(part, b"")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    part.unlink()


def private_folder(folder: Path) -> Path:
    """Return the folder, created for this user alone if it is missing, as are those above it.

    Raises ArgumentError if a user other than this one and root could write to it or replace it.
    """
    folder = folder.absolute()
    for each in (*reversed(folder.parents), folder):
        try:
            each.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise ArgumentError(f"{folder}: {each} is no folder") from None
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        reason = "it is no folder, but perhaps a link"
    elif facts.st_uid != os.geteuid():
        reason = f"it belongs to user {facts.st_uid}, not to user {os.geteuid()}"
    elif _shared(facts):
        reason = f"other users can write to it ({_hint(folder, facts)})"
    else:
        trusted = {0, os.geteuid(), Path("/").stat().st_uid}  # the owner of / could replace anything
        for above in _way(folder.parent):
            facts = above.lstat()
            if facts.st_uid not in trusted:
                reason = f"user {facts.st_uid} can replace it, as the owner of {above}"
                break
            if _shared(facts) and not facts.st_mode & stat.S_ISVTX:
                reason = f"other users can replace it: they can write to {above} ({_hint(above, facts)})"
                break
        else:
            return folder
    raise ArgumentError(f"{folder}: {reason}")


def _shared(facts: os.stat_result) -> bool:
    """Return whether other users can write; the mode of a link says nothing."""
    by_group = bool(facts.st_mode & stat.S_IWGRP) and not _private_group(facts.st_gid)
    return (by_group or bool(facts.st_mode & stat.S_IWOTH)) and not stat.S_ISLNK(facts.st_mode)


def _private_group(number: int) -> bool:
    """Return whether only root, or only this user, is in a group: many systems give each user such a group."""
    import grp  # POSIX only; importing ringcomm works everywhere
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:  # users of a container may have no entry
        return number == 0
    own = (group.gr_name, number) == (user.pw_name, user.pw_gid)
    return (number == 0 or own) and {*group.gr_mem} <= {user.pw_name, "root"}


def _hint(folder: Path, facts: os.stat_result) -> str:
    mode = f"mode {stat.S_IMODE(facts.st_mode):o}"
    return f"{mode}: look at what is in it, then run chmod go-w {shlex.quote(str(folder))}"


def _way(path: Path, links: int = LINKS) -> Iterator[Path]:
    """Yield the path, and all folders and links that lead to it; as in the kernel, a limit on links ends a loop."""
    if not links:
        raise OSError(ELOOP, os.strerror(ELOOP), str(path))
    for step in (*reversed(path.parents), path):
        yield step
        if step.is_symlink():
            yield from _way(step.parent / step.readlink(), links - 1)


def _target(path: Path) -> Path:
    """Follow the links at a path, unless another user may have planted one."""
    for _ in range(LINKS):
        if not path.is_symlink():
            return path.resolve()
        if (owner := path.lstat().st_uid) not in (0, os.geteuid()):
            raise PermissionError(EPERM, f"it is a link of user {owner}, which is not followed", str(path))
        path = path.parent / path.readlink()
    raise OSError(ELOOP, os.strerror(ELOOP), str(path))


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
