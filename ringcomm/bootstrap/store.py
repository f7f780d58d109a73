"""What ranks share during startup: the facts that each gives and all gather, and the error that ends it for all."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ringcomm.bootstrap.client import SLICE, Client, Meanwhile
from ringcomm.bootstrap.endpoint import Endpoint, find_endpoint
from ringcomm.bootstrap.place import Place, host_id
from ringcomm.bootstrap.session import ALL, CONNECTED, FIRST, Contribution, Start, lists_of
from ringcomm.bootstrap.start_errors import missing_ranks, rank_in_job
from ringcomm.bootstrap.wire.unix import UnixGate, user_address
from ringcomm.errors import Aborted, RingcommError, decode_error, encode_error
from ringcomm.machine import descriptors

if TYPE_CHECKING:  # only the rank that serves needs it
    from ringcomm.bootstrap.server import Server

__all__ = [
    "HashStore",
    "Store",
    "all_gather_facts",
    "as_failure",
    "await_connected",
    "job_store",
    "open_store",
    "rank_0_server",
    "ranks_of_host",
    "serve_or_join",
    "shared_failure",
]

LATE = 10.0  # seconds for which rank 0 tells late ranks about a failure

_starts = itertools.count()


class Store(Protocol):
    """What the ranks share before they share memory.

    Attributes:
        server: Where it is served to several hosts, as address:port; "" if it is not, or if that is not known.
        members: The rank in the job of each rank that shares the store: see start_errors.py.
        place: Of this process, if a launcher serves the store, and so until the job ends: survivors can agree there.
    """

    @property
    def server(self) -> str: ...

    @property
    def members(self) -> Sequence[int]: ...

    @property
    def place(self) -> Place | None: ...

    def all_gather(self, given: Contribution, timeout: float, meanwhile: Meanwhile = None) -> bytes | list[int]:
        """Give a fact; once all ranks have, return the list of those that this one reads, by rank.

        If some ranks have not come within `timeout` seconds, return the missing ones. Raises the error of `abort` as
        soon as any rank has called it, unless all facts have come before.
        """

    def abort(self, error: RingcommError) -> None:
        """Fail the startup of all ranks: `all_gather` and `check` raise `error` from now on. The first error wins."""

    def check(self, ask: bool = False) -> None:
        """Raise the error of `abort` if this rank has been told that any rank has called it.

        With `ask`, look whether one has: after a failure, but not in a loop, since one server answers all ranks.
        """


class HashStore:
    """The store for ranks that are threads of one process."""

    server, members, place = "", (), None

    def __init__(self) -> None:
        self._facts: dict[str, dict[int, bytes]] = {}  # by name and rank
        self._reads: dict[str, dict[int, str]] = {}
        self._failure = b""
        self._changed = threading.Condition()

    def all_gather(self, given: Contribution, timeout: float, meanwhile: Meanwhile = None) -> bytes | list[int]:
        name, rank, size, fact, reads = given
        deadline, facts = time.monotonic() + timeout, self._facts.setdefault(name, {})
        self._reads.setdefault(name, {})[rank] = reads
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait = min(left, SLICE) if meanwhile else left
            with self._changed:
                if not self._failure:
                    facts[rank] = fact
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._failure or len(facts) == size, wait)
                if len(facts) == size:
                    return lists_of(facts, self._reads[name])[reads]
                self.check()
            if wait == left:
                return sorted({*range(size)} - facts.keys())
            if meanwhile:
                meanwhile()

    def abort(self, error: RingcommError) -> None:
        with self._changed:
            self._failure = self._failure or encode_error(error).encode()
            self._changed.notify_all()

    def check(self, ask: bool = False) -> None:  # noqa: ARG002 (all ranks see it at once)
        if self._failure:
            raise decode_error(self._failure)


def all_gather_facts(
    store: Store,
    name: str,
    rank: int,
    size: int,
    fact: Any,
    timeout: float,
    meanwhile: Meanwhile = None,
    reads: str = ALL,
) -> list[Any]:
    """Return the facts that this rank reads: see Contribution. Raises CollectiveTimeout naming the missing ones."""
    given = Contribution(name, rank, size, json.dumps(fact).encode(), reads)
    gathered = store.all_gather(given, timeout, meanwhile)
    if isinstance(gathered, list):
        raise missing_ranks(gathered, size, timeout, members=store.members)
    try:
        facts: list[Any] = json.loads(gathered)
    except ValueError:
        facts = []
    if not facts or (reads == ALL and len(facts) != size):
        raise RingcommError(f"the store has sent no list of the facts of {size} ranks: {gathered[:100]!r}")
    return facts


def ranks_of_host(
    store: Store, rank: int, size: int, label: str | None, timeout: float, meanwhile: Meanwhile = None
) -> list[int]:
    """Return the ranks on the host of this one: in one kernel and network namespace, with one `label`. Collective."""
    host = json.dumps([host_id(), label])
    return all_gather_facts(store, "host", rank, size, rank, timeout, meanwhile, reads=host)


def await_connected(store: Store, rank: int, size: int, timeout: float) -> None:
    """Return on all ranks of a start once all have connected, or raise the same error on all.

    A rank may fail when some know that all have connected, and others do not yet: what comes first to the store, the
    last of the ranks or a failure, decides for all.
    """
    try:
        all_gather_facts(store, CONNECTED, rank, size, None, timeout, reads=FIRST)
    except RingcommError as error:
        store.abort(error)
        given = Contribution(CONNECTED, rank, size, b"null", FIRST)
        store.all_gather(given, 0.0)  # raises the failure, unless it came too late


@contextmanager
def open_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of the next startup of all ranks of this job; if the body raises on one, startup fails on all.

    Each rank numbers its startups, so that a second one does not join the store of the first.
    """
    start = replace(place, job=f"{place.job}#{next(_starts)}", members=range(place.size))
    with job_store(start, timeout) as store:
        yield store


@contextmanager
def job_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of a job that no other startup uses."""
    serve: Callable[[], Server] | None = None if place.store else partial(rank_0_server, place)
    if place.rank_0:
        from ringcomm.bootstrap.rank_0 import find_rank_0, serve_hosts

        place = find_rank_0(place)
        serve = partial(serve_hosts, place, timeout)
    with serve_or_join(serve, find_endpoint(place), place, timeout) as store:
        yield store


@contextmanager
def serve_or_join(
    serve: "Callable[[], Server] | None", endpoint: Endpoint, place: Place, timeout: float
) -> Iterator[Store]:
    """Open the store of the session `place.job`. Rank 0 serves it, unless a launcher does."""
    if place.size == 1 and not place.store:
        yield HashStore()
        return
    serve, refused = None if place.rank else serve, None
    if serve:  # before the others connect
        from ringcomm.bootstrap.server import serving

        try:
            descriptors.provide(0, place.size, place.members)
        except RingcommError as error:
            refused = error
    with (
        serving(serve(), min(timeout, LATE)) if serve else nullcontext(),
        Client(endpoint, place.job, place, timeout) as store,
        shared_failure(store, place.rank),
    ):
        if refused:
            raise refused
        yield store


def rank_0_server(place: Place) -> "Server":
    """Serve the store in this process, rank 0."""
    from ringcomm.bootstrap.server import Server

    number = rank_in_job(place.members, 0)
    gate = UnixGate(user_address(place.job), f"rank {number} of job {place.job!r}")
    return Server(gate, number, place.secret, (place.job, Start(place.size, place.members)))


@contextmanager
def shared_failure(store: Store, rank: int) -> Iterator[None]:
    """Abort the startup of all ranks with the error that the body raises on this one."""
    try:
        yield
    except BaseException as error:
        store.abort(as_failure(error, rank_in_job(store.members, rank)))
        raise


def as_failure(error: BaseException, rank: int) -> RingcommError:
    """Return the error that ends the startup of all ranks after `error` of this one, by its number in the job."""
    if isinstance(error, RingcommError):
        return error
    return Aborted(f"rank {rank} aborted startup: {error!r}", rank=rank)
