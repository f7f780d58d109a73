"""Records the calls of a communicator: a file per rank, filled by native code, that outlives a rank that is killed.

A file begins with a header in JSON of 4,096 bytes; entries.py reads both.
"""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringcomm.bootstrap.place import host_id
from ringcomm.config import trace_folder
from ringcomm.errors import ArgumentError
from ringcomm.native import check, ffi, lib

__all__ = ["HEADER_BYTES", "SUFFIX", "VERSION", "record", "record_if_asked"]

VERSION = 1
HEADER_BYTES = 4096
SUFFIX = ".trace"


def record_if_asked(handle: Any, rank: int, size: int) -> None:
    """Record the calls of a new communicator where RINGCOMM_TRACE names a folder."""
    if folder := trace_folder():
        record(handle, rank, size, folder)


def record(handle: Any, rank: int, size: int, folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Record the calls of this rank from now on, in a new file in the folder; return what ends that.

    Raises ArgumentError if the file cannot be made, and MemoryShortage if the disk is full.
    """
    number = ffi.new("uint64_t *")
    check(lib.rc_group_id(handle, number))
    facts = {"version": VERSION, "group": f"{number[0]:016x}", "rank": rank, "size": size, "pid": os.getpid()}
    facts |= {"thread": threading.get_native_id(), "host": host_id()}
    header = json.dumps(facts).encode().ljust(HEADER_BYTES)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fd, _ = tempfile.mkstemp(SUFFIX, f"{facts['group']}-{rank}-", folder)
        with open(fd, "r+b") as file:
            file.write(header)
            file.flush()
            check(lib.rc_trace(handle, file.fileno()))
    except OSError as error:
        raise ArgumentError(f"cannot write a trace to {folder}: {error.strerror}") from error
    return lambda: check(lib.rc_trace(handle, -1))
