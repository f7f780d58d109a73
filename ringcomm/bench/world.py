"""`ringcomm bench` in a world: the processes that a launcher has started are the ranks, as those of nccl-tests are.

Rank 0 measures and prints; the others answer its requests, which travel over the communicator that is measured.
"""

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ringcomm
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, Communicator, Config, PeerLost
from ringcomm.bench.comparison import OURS, Comparison, LibraryFailure
from ringcomm.bench.interrupts import Interrupted
from ringcomm.bench.job import answers_of
from ringcomm.bench.peers import LAUNCHED
from ringcomm.bench.rank.library import Library
from ringcomm.bench.rank.measure import RankBench, describe
from ringcomm.bench.rank.ringcomm import RingcommLibrary
from ringcomm.bench.sweep import Sweep
from ringcomm.bootstrap.place import Place, find_place, host_id

__all__ = ["ERROR", "World", "find_world", "hosts_of", "let_rank_0_speak", "run_on_ranks"]

ERROR = 2  # the exit status


def find_world() -> Place | None:
    """Return the place of this process among the ranks that a launcher has started; None: it is alone."""
    place = find_place()
    return place if place.size > 1 else None


def let_rank_0_speak(parser: argparse.ArgumentParser) -> None:
    """Print help and usage errors on rank 0 only, since all ranks have the same arguments."""
    with suppress(ArgumentError):  # which the command will raise
        if (place := find_world()) and place.rank > 0:
            parser._print_message = lambda *_: None  # type: ignore[method-assign]  # argparse's own method


def run_on_ranks(program: Callable[[Communicator], int], timeout: float | None = None) -> int:
    """Connect the ranks of this world, call `program` on each, and return the exit status of this one.

    What fails on all ranks is reported by rank 0, unless it is lost itself.
    """
    rank = find_place().rank
    try:
        with ringcomm.init(timeout=timeout) as comm:
            try:
                return program(comm)
            except ArgumentError:  # all ranks have the same arguments
                if rank == 0:
                    raise
                return ERROR
    except (Aborted, CollectiveTimeout, PeerLost) as error:
        if rank == 0 or (error.rank == 0 and not isinstance(error, Aborted)):
            raise
        return ERROR
    except Interrupted as interrupt:
        if rank == 0:
            raise
        return interrupt.status


def hosts_of(comm: Communicator) -> list[tuple[str, str | None]]:
    """Return the host of each rank."""
    return comm.all_gather_object((host_id(), Config().host_id))


class World:
    """All ranks, and the libraries to measure; this process is one of the ranks."""

    def __init__(self, comm: Communicator, device: str, timeout: float) -> None:
        # So that the launcher can end a rank that hangs inside another library, where Python handles no signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.comm, self.launcher = comm, find_place().launcher
        hosts = hosts_of(comm)
        self.hosts, self.here = len({*hosts}), hosts.count(hosts[comm.rank])  # and the ranks on this one
        self.libraries: dict[str, Library] = {OURS: RingcommLibrary(comm, device)}
        self.failures: list[LibraryFailure] = []
        if device == "host" and self.launcher in LAUNCHED:
            # Half: a rank that waits for another inside the library can still say so while the others wait for it.
            self._start(*LAUNCHED[self.launcher], timeout / 2)
        self.benches = {name: RankBench(library) for name, library in self.libraries.items()}

    def _start(self, name: str, module: str, package: str, timeout: float) -> None:
        """Start the library that the launcher brings, unless a rank cannot."""
        library: Library | None = None
        for step in (partial(require, package), partial(start, module, self.comm.size, timeout)):
            reason = ""
            try:
                library = step()
            except Exception as error:  # of any kind: the other ranks have to know
                reason = describe(error)
            try:
                reasons = self.comm.all_gather_object(reason)
            except CollectiveTimeout as error:  # other ranks wait inside the library
                if reason:
                    error.args = (f"{error}\n{name} did not start on rank {self.comm.rank}: {reason}",)
                raise
            if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]:
                self.failures.append(LibraryFailure(name, self.comm.size, None, None, failed[0]))
                return
        assert library
        self.libraries[name] = library

    @contextmanager
    def compare(self, sweep: Sweep) -> Iterator[Comparison]:
        """Yield the comparison, on rank 0; the others serve until the end of the block."""
        placement = f"on {self.hosts} host{'s' * (self.hosts > 1)}, started by {self.launcher}"
        jobs = [WorldRanks(self, name) for name in self.benches]
        yield Comparison(sweep, self.comm.size, placement, None, [*jobs], self.failures)
        self.comm.broadcast_object(None)
        self.close()

    def serve(self) -> None:
        """Answer the requests of rank 0 until it has no more."""
        while request := self.comm.broadcast_object():
            self.answer(*request)
        self.close()

    def answer(self, library: str, *request: Any) -> list[tuple[str, Any]]:
        """Carry out a request on all ranks; return on rank 0 the outcome of each."""
        return self.comm.gather_object(self.benches[library].answer(request)) or []

    def close(self) -> None:
        for bench in reversed(self.benches.values()):  # ringcomm last: it may run over the MPI of another
            bench.close()


class WorldRanks:
    """The ranks of one library in this world, on rank 0."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.versions = name, world.libraries[name].versions
        self._world = world

    def request(self, name: str, *arguments: Any, timeout: float | None = None) -> list[Any]:  # noqa: ARG002 (that of the communicator)
        """Return the answer of each rank. A rank that does not answer fails all, by the timeout of the communicator."""
        request = self.name, name, *arguments
        self._world.comm.broadcast_object(request)
        return answers_of(dict(enumerate(self._world.answer(*request))), self._world.comm.size)

    def close(self) -> None:
        """The ranks close their libraries when rank 0 has no more requests."""


def require(package: str) -> None:
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"no {package} is installed")


def start(module: str, size: int, timeout: float) -> Library:
    library: Library = import_module(f"ringcomm.bench.rank.{module}").start("", "host", timeout)
    if library.size != size:
        raise RuntimeError(f"it knows {library.size} of {size} ranks: is it the one of the launcher?")
    return library
