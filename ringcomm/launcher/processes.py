"""Signal rank processes and describe how they ended. As a program, the reaper of `ringcomm run`.

All ranks start in one process group, so that their own children end with them. A rank that leaves the group, by
os.setsid or as timeout(1) does, is signaled by its own id.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["EXIT_TIMEOUT", "MAX_RANKS", "START_CALLS", "describe_exit", "send_signal"]

MAX_RANKS = 1024  # per machine: more is a typo, and would make the machine unusable

START_CALLS = "fork or setpgid"  # which start a process in a group
EXIT_TIMEOUT = 5.0  # seconds the other ranks have to exit after one has failed; `run --help` and launch() document it


def send_signal(number: int, group: int, ranks: Iterable[int]) -> None:
    """Send a signal to a process group, and to the ranks that have left it with the groups that they lead."""
    for pid in ranks:
        with suppress(ProcessLookupError, PermissionError):  # it has exited, or changed its user
            own = os.getpgid(pid)
            if own == pid:
                os.killpg(pid, number)
            elif own != group:
                os.kill(pid, number)
    os.killpg(group, number)


def describe_exit(status: int) -> str:
    """Describe the end of a process from its return code, as in subprocess."""
    if status >= 0:
        return f"exited with status {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def _reap() -> None:
    """Wait until `ringcomm run` exits, then kill this process group and the ranks.

    `ringcomm run` writes the pid of each rank to stdin when it starts the rank, and again when the rank has exited.
    """
    ranks: set[int] = set()
    for line in sys.stdin:
        ranks ^= {int(line)}
    send_signal(signal.SIGKILL, os.getpgrp(), ranks)


if __name__ == "__main__":
    _reap()
