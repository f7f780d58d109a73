"""Frees the memory of closed groups of GPUs.

Peers may have it mapped, and CUDA leaves undefined what freeing it does then. So a thread waits until they have closed
the group too, while the program goes on.
"""

import atexit
import logging
import threading
import time
from typing import Any

from ringcomm.errors import RingcommError
from ringcomm.machine.threads import start_thread
from ringcomm.transports.contract import LocalTransport

__all__ = ["free_once_closed", "keep"]

LAST_WAIT = 2.0  # seconds in which the peers close too, when the process ends

log = logging.getLogger("ringcomm")
_kept: list[Any] = []  # memory that peers, or graphs, may use until the process ends
_waiting: set[threading.Thread] = set()
_exits = threading.Event()


def keep(memory: list[Any]) -> None:
    """Keep memory until the process ends."""
    _kept.extend(memory)


def free_once_closed(channel: LocalTransport, memory: list[Any], owner: str) -> None:
    """Drop memory once all ranks of the channel have called this; if some never do, keep it. Close the channel."""

    def wait() -> None:
        try:
            channel.all_gather_facts("all_gather", "closed", LAST_WAIT if _exits.is_set() else -1.0)
        except (RingcommError, RuntimeError):
            log.warning("%s until it ends: not all ranks have closed the communicator", owner)
            keep(memory)
        memory.clear()
        channel.close()
        _waiting.discard(threading.current_thread())

    try:
        _waiting.add(start_thread("ringcomm free", wait))
    except RingcommError:  # the interpreter ends, or the system refuses a thread
        wait()


def _wait_for_the_last() -> None:
    _exits.set()
    end = time.monotonic() + LAST_WAIT
    for thread in [*_waiting]:
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_wait_for_the_last)
