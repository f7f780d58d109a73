"""Processes of this machine: their names in a start, whether they run or are stopped, and descriptors to watch them."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from ringcomm.machine import descriptors

__all__ = ["is_running", "is_stopped", "open_pidfd", "process_id"]

UNKNOWN = "unknown"


def process_id() -> str:
    """Return the id of this process, which no other process of its pid namespace has had or will have."""
    return f"{_namespace()} {os.getpid()} {_start_time(os.getpid())}"


def is_running(announced: str) -> bool:
    """Return whether the process with this `process_id` runs, as far as can be told from here."""
    namespace, pid, started = announced.rsplit(" ", 2)
    return namespace != _namespace() or (_start_time(int(pid)) == started and _stat(int(pid), 3) not in "ZX")


def open_pidfd(pid: int, rank: int) -> int:
    """Return a pidfd, or -1 where the kernel has none or forbids it; `rank` is the one that calls, for the error.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # the last two: it is the id of a thread
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            return -1
        raise descriptors.exhausted(rank, "to watch a process", error) from None


def is_stopped(pid: int, states: str = "Tt") -> bool:
    """Return whether a signal (T) or a debugger (t) has stopped this process."""
    return _stat(pid, 3) in states


def _start_time(pid: int) -> str:
    """Return when a process was started, in ticks since the boot; UNKNOWN if /proc does not tell."""
    return _stat(pid, 22)


def _stat(pid: int, field: int) -> str:
    """Return a field of /proc/<pid>/stat, numbered as in proc(5); UNKNOWN if there is none."""
    with suppress(OSError):
        # The second field is the name of the program in parentheses, which may hold any character.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[field - 3].decode()
    return UNKNOWN


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc: nothing tells the namespaces apart
        return f"of process {os.getpid()}"
