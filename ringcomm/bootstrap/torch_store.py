"""A start through a store of torch.distributed, as torchrun serves one.

The ranks first agree on a name that is unique to this start, then tell each other where they run. Only this module of
those below ringcomm.torch imports torch; who imports it is about to use such a store.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm.bootstrap.facts import all_gather_facts
from ringcomm.bootstrap.place import host_id
from ringcomm.bootstrap.process_watch import ProcessWatch, process_id
from ringcomm.bootstrap.store import shared_failure
from ringcomm.bootstrap.torch_agreement import NameAgreement, wait_briefly
from ringcomm.errors import CollectiveTimeout, PeerLost, RingcommError, decode_error, encode_error

__all__ = ["TorchStart", "TorchStoreAdapter", "start_through", "start_under_torchrun", "store_lost"]

c10d: Any = dist.distributed_c10d
TorchStore = Any

REPORT_TIMEOUT = 1.0  # seconds for rank 0 to name the ranks that did not join
EXIT = 1.0  # seconds for a process to end after it has closed its connections, on a loaded machine
FAILURE = "failure"


class TorchStart(NamedTuple):
    """A start: its store, torch's under a name that no other start has, and whether its ranks are on several hosts."""

    rank: int
    size: int
    store: "TorchStoreAdapter"
    torch_store: TorchStore
    hosts: bool


@contextmanager
def start_under_torchrun(timeout: float, identity: str | None) -> Iterator[TorchStart]:
    """Start through the store that torchrun serves; see start_through."""
    torch_store, rank, size = next(c10d.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    with start_through(c10d.PrefixStore("ringcomm.init", torch_store), rank, size, timeout, identity) as start:
        yield start


@contextmanager
def start_through(
    torch_store: TorchStore, rank: int, size: int, timeout: float, identity: str | None
) -> Iterator[TorchStart]:
    """Start through a store of torch: the body connects the ranks. At its end rank 0 waits for the others.

    `identity`: that of this host in the settings. Raises PeerLost if the store, or a rank on this host, is lost.
    """
    with closing(ProcessWatch(rank)) as watch:
        try:
            named = c10d.PrefixStore(_agree(torch_store, rank, size, timeout, watch), torch_store)
            store = TorchStoreAdapter(named, watch)
            with shared_failure(store, rank):
                hosts = _on_several_hosts(store, rank, size, timeout, identity, watch)
                yield TorchStart(rank, size, store, named, hosts)
                # The store may live in rank 0, which leaves last.
                store.set(f"{rank} is connected", b"")
                if rank == 0:
                    _await_connected(size, timeout, named, store, watch)
        except dist.DistNetworkError as error:
            deadline = time.monotonic() + EXIT
            while time.monotonic() < deadline:
                watch.check()
                time.sleep(0.02)
            raise store_lost(error) from None


def store_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the store of torch.distributed is lost: {error}")


def _on_several_hosts(
    store: "TorchStoreAdapter", rank: int, size: int, timeout: float, identity: str | None, watch: ProcessWatch
) -> bool:
    """Return whether the ranks are on several hosts; watch the processes of those here."""
    mine = {"process": process_id(), "host": [host_id(), identity]}
    ranks = all_gather_facts(store, "process", rank, size, mine, timeout + (REPORT_TIMEOUT if rank else 0.0))
    for other, facts in enumerate(ranks):
        if facts["host"][0] == host_id() and other != rank:
            watch.add(other, facts["process"], now=True)
    return len({tuple(facts["host"]) for facts in ranks}) > 1


def _await_connected(
    size: int, timeout: float, start: TorchStore, store: "TorchStoreAdapter", watch: ProcessWatch
) -> None:
    """Wait until the other ranks are connected. One that is may leave, and exit, while others are not."""
    deadline = time.monotonic() + timeout
    for other in range(1, size):
        while not wait_briefly(start, key := f"{other} is connected", deadline):
            lost = watch.lost()  # before the keys: a rank sets its own before it exits
            store.check_failure()
            for error in lost:
                assert error.rank is not None
                if not start.check([f"{error.rank} is connected"]):
                    raise error
                watch.remove(error.rank)
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")


def _agree(store: TorchStore, rank: int, size: int, timeout: float, watch: ProcessWatch) -> str:
    """Agree on the name of this start of these ranks."""
    agreement = NameAgreement(store, rank, size, timeout, watch)
    if rank:
        return agreement.follow()
    try:
        return agreement.lead()
    except RingcommError as error:
        TorchStoreAdapter(c10d.PrefixStore(agreement.name, store), watch).abort(error)  # for the ranks that have joined
        raise


class TorchStoreAdapter:
    """A store of torch as a ringcomm.bootstrap.store.Store."""

    place = None  # the store of torch may end before the job
    members = ()  # torch names ranks as its group numbers them, and says which group that is

    def __init__(self, store: TorchStore, watch: ProcessWatch) -> None:
        self._store, self._watch = store, watch

    @property
    def server(self) -> str:
        store = self._store
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        return f"{store.host}:{store.port}" if hasattr(store, "port") else ""  # a TCPStore

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not wait_briefly(self._store, key, deadline):
            self.check()
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
        self.check()
        return bytes(self._store.get(key))

    def abort(self, error: RingcommError) -> None:
        self._store.set(FAILURE, encode_error(error))

    def check(self) -> None:
        self.check_failure()
        self._watch.check()

    def check_failure(self) -> None:
        if self._store.check([FAILURE]):
            raise decode_error(self._store.get(FAILURE))
