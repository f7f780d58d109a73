"""Notices the death of other ranks of this machine where only a store connects them: it cannot tell."""

import os
import select
from contextlib import suppress

from ringcomm.bootstrap.sockets import close_descriptors
from ringcomm.errors import PeerLost

__all__ = ["ProcessWatch", "process_id"]


def process_id() -> str:
    """Return the id of this process, which is unique in its pid namespace."""
    return f"{_namespace()} {os.getpid()}"


class ProcessWatch:
    """The processes of ranks that have announced themselves by `process_id`."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}

    def add(self, rank: int, announced: str) -> None:
        """Watch the process of a rank. One that has died already left its announcement in an earlier start."""
        namespace, _, pid = announced.rpartition(" ")
        close_descriptors([self._pidfds.pop(rank, -1)])
        if namespace == _namespace():
            with suppress(OSError):  # it has died, or the kernel has no pidfds
                self._pids[rank], self._pidfds[rank] = int(pid), os.pidfd_open(int(pid))

    def check(self) -> None:
        """Raise PeerLost if a watched process has died."""
        for rank, pidfd in self._pidfds.items():
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if ended.poll(0):
                raise PeerLost(f"rank {rank} (process {self._pids[rank]}) exited during startup", rank=rank)

    def close(self) -> None:
        close_descriptors(self._pidfds.values())
        self._pidfds.clear()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc: nothing tells the namespaces apart
        return f"of process {os.getpid()}"
