"""Files that are there whole, or as they were before."""

import os
import shutil
import threading
from errno import EISDIR
from pathlib import Path

__all__ = ["check_writable", "replace"]


def replace(path: Path, data: bytes) -> None:
    """Write a file, and its folders, in one step, whatever ends this process: others may read it, or do the same."""
    if _is_device(path):
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        part.write_bytes(data)
        if path.exists():
            shutil.copymode(path, part)
        try:
            part.replace(path)
        except OSError:  # a mount of its own, as containers have
            path.write_bytes(data)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError now where `replace` could not write a file later, in a folder that is there."""
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
    """Say whether nothing can take its place: a pipe, or /dev/stdout, which may be a file that a shell has open."""
    return (path.exists() and not (path.is_file() or path.is_dir())) or path.absolute().parts[:2] in (
        ("/", "dev"),
        ("/", "proc"),
    )


def _part(path: Path) -> Path:
    return path.with_name(f".ringcomm-{os.getpid()}-{threading.get_ident()}")
