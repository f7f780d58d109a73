"""Notices the death of other ranks of this machine where only a store connects them: it cannot tell."""

import errno
import os
import select
from contextlib import suppress
from pathlib import Path

from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.wire.unix import close_descriptors
from ringcomm.errors import PeerLost
from ringcomm.machine import descriptors

__all__ = ["ProcessWatch", "is_stopped", "open_pidfd", "process_id"]

UNKNOWN = "unknown"


def process_id() -> str:
    """Return the id of this process, which no other process of its pid namespace has had or will have."""
    return f"{_namespace()} {os.getpid()} {_start_time(os.getpid())}"


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


class ProcessWatch:
    """The processes of ranks that have announced themselves by `process_id`; `rank` is the one that watches."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._announced: dict[int, str] = {}
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()  # noticed without a pidfd

    def add(self, rank: int, announced: str, *, now: bool) -> None:
        """Watch the process of a rank.

        One that has died already is lost if it has announced itself `now`, in this start; otherwise it may have done so
        in an earlier one, and is ignored.
        """
        if announced == self._announced.get(rank):
            return
        self.remove(rank)
        namespace, pid, started = announced.rsplit(" ", 2)
        if namespace != _namespace():
            return
        pidfd = -1
        try:
            pidfd = open_pidfd(int(pid), self._rank)
            reused = UNKNOWN not in (started, runs := _start_time(int(pid))) and started != runs
            died = _ended(pidfd) or reused
        except ProcessLookupError:
            died = True
        if died:
            close_descriptors([pidfd])
        if died and not now:
            return
        self._announced[rank] = announced
        if died:
            self._dead.add(rank)
        elif pidfd >= 0:
            self._pidfds[rank] = pidfd

    def remove(self, rank: int) -> None:
        """Watch a rank no longer."""
        self._announced.pop(rank, None)
        self._dead.discard(rank)
        close_descriptors([self._pidfds.pop(rank, -1)])

    def lost(self) -> list[PeerLost]:
        """Return an error for each watched process that has died."""
        ranks = sorted(self._dead | {rank for rank, pidfd in self._pidfds.items() if _ended(pidfd)})
        return [lost_in_start(rank, f"process {self._announced[rank].split()[-2]}") for rank in ranks]

    def check(self) -> None:
        """Raise PeerLost if a watched process has died."""
        for error in self.lost():
            raise error

    def close(self) -> None:
        close_descriptors(self._pidfds.values())
        self._pidfds.clear()


def _ended(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


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
