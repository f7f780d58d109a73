"""Ranks that are threads of this process, for tests of a transport: any `connect`, any settings of a communicator."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringcomm.bootstrap.store import HashStore, Store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import Aborted
from ringcomm.transports.contract import Transport

__all__ = ["connect_threads", "run_threads"]

T = TypeVar("T")
Connect = Callable[[int, int, Store, Config], Transport]


def connect_threads(connect: Connect, size: int, timeout: float = 10.0) -> list[Transport]:
    """Connect `size` ranks that are threads of this process; return their transports in rank order."""
    store, config = HashStore(), Config(timeout=timeout)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: connect(rank, size, store, config), range(size)))


def run_threads(function: Callable[[Communicator], T], communicators: Sequence[Communicator]) -> list[T]:
    """Call `function(comm)` for every communicator on its own thread, close it, and return the results.

    If one raises, the others are aborted and its error is raised.
    """

    def run(comm: Communicator) -> T:
        with comm:
            return function(comm)

    with ThreadPoolExecutor(len(communicators)) as pool:
        futures = [pool.submit(run, comm) for comm in communicators]
    failures = [error for future in futures if (error := future.exception())]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, Aborted))  # the cause, not its consequences
    return [future.result() for future in futures]
