"""Files that are there whole, or as they were before."""

import os
import threading
from pathlib import Path

__all__ = ["check_writable", "replace"]


def replace(path: Path, data: bytes) -> None:
    """Write a file, and its folders, in one step, whatever ends this process: others may read it, or do the same."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError now if `path` could not be written later."""
    there = path.exists()
    path.open("a").close()
    if not there:
        path.unlink()
