"""Records the calls of a communicator: a file per rank, filled by native code, that outlives a rank that is killed.

A file begins with a header of 4,096 bytes: JSON, and in the last 8 the number of calls for which there was no room.
The entries follow, in whole pieces of 1 MiB. files.py reads both.
"""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np

from ringcomm.bootstrap.place import Place, host_id
from ringcomm.bootstrap.processes import process_id
from ringcomm.config import trace_folder
from ringcomm.errors import ArgumentError, MemoryShortage, RingcommError, refuse
from ringcomm.native import check, ffi, lib

__all__ = [
    "DROPPED",
    "HEADER_BYTES",
    "MARK_BYTES",
    "PIECE_BYTES",
    "SUFFIX",
    "VERSION",
    "check_folder_if_asked",
    "checksum",
    "group_id",
    "record",
    "record_if_asked",
]

log = logging.getLogger("ringcomm")

VERSION = 4
HEADER_BYTES = 4096
DROPPED = slice(HEADER_BYTES - 8, HEADER_BYTES)
PIECE_BYTES = 1 << 20  # by which the file grows: see bindings/src/core/trace.cpp
SUFFIX = ".trace"
MARK_BYTES = 35  # of a name: see TraceEntry in bindings/src/core/trace.h
COPY_BYTES = 16 << 20  # of a memcpy: more than its core's share of the caches
ORIGIN = ", where RINGCOMM_TRACE points"

_warned: set[str] = set()  # folders for which a group is not traced


def group_id(handle: Any) -> str:
    """Return an id that all ranks of a group have, and no other group."""
    number = ffi.new("uint64_t *")
    check(lib.rc_group_id(handle, number))
    return f"{number[0]:016x}"


def checksum(facts: dict[str, Any]) -> int:
    """Return that of a header, by which a reader knows damage."""
    return crc32(json.dumps(facts).encode())


def check_folder_if_asked() -> None:
    """Raise ArgumentError if a first trace could not be written where RINGCOMM_TRACE points."""
    if folder := trace_folder():
        import tempfile

        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + PIECE_BYTES)
        except OSError as error:
            raise _unwritable(folder, ORIGIN, error) from None


def record_if_asked(handle: Any, rank: int, size: int, place: Place) -> None:
    """Record the calls of a new communicator where RINGCOMM_TRACE names a folder.

    If that cannot be, as on a disk that is full by now, there is one warning: the job goes on.
    """
    if folder := trace_folder():
        try:
            record(handle, rank, size, place, folder, ORIGIN)
        except ArgumentError as error:
            if folder not in _warned:
                _warned.add(folder)
                log.warning("%s; groups without a file there are not traced", error)


def record(
    handle: Any, rank: int, size: int, place: Place, folder: str | os.PathLike[str], origin: str = ""
) -> Callable[[], None]:
    """Record the calls of this rank from now on, in a new file in the folder; return what ends that.

    `place` is that in the job. Raises ArgumentError if the file cannot be made, as on a full disk; `origin` then tells
    where the folder is from.
    """
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise refuse("folder", "a folder", repr(folder))
    import tempfile  # and with it random and shutil, where a trace is asked for

    facts = {"version": VERSION, "group": group_id(handle), "rank": rank, "size": size, "memcpy": _memcpy()}
    facts |= {"job": place.job, "job_rank": place.rank, "job_size": place.size}
    facts |= {"host": host_id(), "process": process_id(), "pid": os.getpid()}
    facts["checksum"] = checksum(facts)
    header = json.dumps(facts).encode().ljust(DROPPED.start) + bytes(8)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(SUFFIX, f"{facts['group']}-{rank}-", folder)
        try:
            with open(fd, "r+b") as file:
                file.write(header)
                file.flush()
                check(lib.rc_trace(handle, file.fileno()))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, RingcommError) as error:
        if isinstance(error, RingcommError) and type(error) not in (RingcommError, MemoryShortage):
            raise  # it was closed meanwhile, say
        raise _unwritable(folder, origin, error) from None
    return lambda: check(lib.rc_trace(handle, -1))


def _unwritable(folder: str | os.PathLike[str], origin: str, error: Exception) -> ArgumentError:
    reason = getattr(error, "strerror", None) or error
    return ArgumentError(f"cannot write a trace to {folder}{origin}: {reason}")


@cache
def _memcpy() -> float:
    """Return the GB/s of a copy in memory by this process, while other ranks may do the same."""
    source, target = np.ones((2, COPY_BYTES), np.uint8)
    times = []
    for _ in range(3):
        start = perf_counter()
        np.copyto(target, source)
        times.append(perf_counter() - start)
    return COPY_BYTES / min(times) * 1e-9
