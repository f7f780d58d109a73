"""Before MPI_Finalize, at exit: nothing may be in flight then, or it might wait for ever.

A lost rank is noticed elsewhere: bindings/src/link/message_liveness.cpp.
"""

import logging
import os
import signal
import sys
import time
import weakref
from typing import Protocol

__all__ = ["Leaving", "abort_at_exit", "leaving"]

log = logging.getLogger("ringcomm")

ABORT_DELAY = 2.0  # seconds for the other ranks to handle a failure, before the exit of this one aborts the job
ABORT = 5  # seconds for MPI_Abort, before the process ends without it


class Leaving(Protocol):
    """A communicator of MPI that this rank has left, and other ranks perhaps not."""

    def free_if_unused(self) -> bool:
        """Give it back to MPI if all ranks have left; return whether that is done."""
        ...

    def end(self) -> None:
        """End all use of it, at exit."""
        ...


leaving: list[Leaving] = []
_in_flight: list[object] = []  # what MPI may still use after a failure, and unfinished calls
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=leaving.clear)
    os.register_at_fork(after_in_child=_in_flight.clear)


def abort_at_exit(what: object) -> None:
    """Keep something that MPI may still use alive for ever, and abort the job at exit."""
    _in_flight.append(what)


def _leave() -> None:
    for each in [*leaving]:
        each.end()
    if _in_flight:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        time.sleep(ABORT_DELAY)
        log.warning("MPI_Abort: communication is in flight that will not end, and MPI_Finalize might not return")
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ABORT)  # MPI_Abort itself may wait for an unreachable host
        MPI.COMM_WORLD.Abort(1)


# At exit finalizers run from the newest to the oldest: this one after those that close communicators.
weakref.finalize(abort_at_exit, _leave)
