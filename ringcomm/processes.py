"""Processes that are ranks: how to end them, and how they ended. As a program, the guard of `ringcomm run`.

Ranks are started in one process group, so that what they start in turn ends with them. But a rank may leave the group,
by os.setsid or as a program like timeout(1) does; then it is signalled by its own id.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["GRACE", "MOST_RANKS", "ending", "send"]

MOST_RANKS = 1024  # of one start on one machine: more is a slip of the finger, and would not leave it usable

GRACE = 5.0  # seconds the others have to end by themselves when a rank has failed; `run --help` and launch() promise it


def send(number: int, group: int, ranks: Iterable[int]) -> None:
    """Send a signal to a process group, and to those of its ranks that have left it, with the groups they lead now."""
    for pid in ranks:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or become another user
            own = os.getpgid(pid)
            if own == pid:
                os.killpg(pid, number)
            elif own != group:
                os.kill(pid, number)
    os.killpg(group, number)


def ending(status: int) -> str:
    """Return in words how a process ended, from its exit code as subprocess gives it."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


def _guard() -> None:
    """Wait for the end of `ringcomm run`, which writes the id of each rank when it starts and again when it has ended;
    then kill the group of this process, and the ranks.
    """
    ranks: set[int] = set()
    for line in sys.stdin:
        ranks ^= {int(line)}
    send(signal.SIGKILL, os.getpgrp(), ranks)


if __name__ == "__main__":
    _guard()
