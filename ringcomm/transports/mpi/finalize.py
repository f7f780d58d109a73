"""How a process leaves MPI: in the end nothing may be in flight, or MPI_Finalize might wait for ever."""

import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

from ringcomm.errors import CollectiveTimeout
from ringcomm.machine.threads import start_thread

__all__ = ["Leaving", "abort_at_exit", "leaving", "with_timeout"]

log = logging.getLogger("ringcomm")

T = TypeVar("T")

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


def with_timeout(timeout: float, description: str, call: Callable[[], T]) -> T:
    """Return `call()`, which blocks inside MPI; raise CollectiveTimeout if it takes too long.

    Below MPI_THREAD_MULTIPLE no other thread can watch the clock, and there is no timeout.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call()
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = start_thread("ringcomm MPI", run)
    try:
        return result.result(timeout)
    except FutureTimeout:
        abort_at_exit(thread)
        text = f"{description} took more than {timeout:g} s: a rank did not join, or is lost"
        raise CollectiveTimeout(text) from None
    except BaseException:
        if not result.done():  # it was interrupted
            abort_at_exit(thread)
        raise
