"""Connects the ranks of a torch.distributed group through torch's store."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcomm.bootstrap.facts import all_gather_facts
from ringcomm.bootstrap.place import host_id
from ringcomm.bootstrap.process_watch import ProcessWatch, process_id
from ringcomm.bootstrap.store import shared_failure
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import CollectiveTimeout, PeerLost, RingcommError, decode_error, encode_error
from ringcomm.start import connect as connect_ranks
from ringcomm.torch.agreement import Agreement, wait_briefly
from ringcomm.torch.compat.torchrun import let_the_cause_end_first
from ringcomm.torch.groups import connect_ranks_of_world, remember

__all__ = ["TorchStoreAdapter", "connect", "connect_job", "connected"]

log = logging.getLogger("ringcomm")

c10d: Any = dist.distributed_c10d
Store = Any  # of torch

REPORT_TIMEOUT = 1.0  # seconds for rank 0 to name the ranks that did not join
EXIT = 1.0  # seconds for a process to end after it has closed its connections, on a loaded machine
FAILURE = "failure"

_prepared: list[Communicator] = []  # for the default group that is made next


def connect(options: Any) -> Communicator:
    """Connect the ranks of a group, given torch's DistributedBackendOptions."""
    let_the_cause_end_first()
    config, ranks = Config(timeout=options.timeout.total_seconds()), list(options.global_ranks_in_group)
    if ranks:  # else it is the default group
        try:
            comm = connect_ranks_of_world(options.group_id, ranks, config.timeout)
        except dist.DistNetworkError as error:
            raise _store_lost(error) from None
        if comm is not None:
            return comm
    elif _prepared:
        remember(_prepared[0], options.store)
        return _prepared[0]
    return _connect_through(options.store, options.group_rank, options.group_size, config)


@contextmanager
def connected(comm: Communicator) -> Iterator[None]:
    """Use this communicator for a default group that is made in the body."""
    _prepared.append(comm)
    try:
        yield
    finally:
        _prepared.clear()


def connect_job(config: Config) -> Communicator:
    """Connect the ranks that torchrun has started, for ringcomm.init."""
    torch_store, rank, size = next(c10d.rendezvous("env://", timeout=timedelta(seconds=config.start_limit)))
    return _connect_through(c10d.PrefixStore("ringcomm.init", torch_store), rank, size, config)


def _connect_through(torch_store: Store, rank: int, size: int, config: Config) -> Communicator:
    with closing(ProcessWatch(rank)) as watch:
        try:
            start = c10d.PrefixStore(_agree(torch_store, rank, size, config.start_limit, watch), torch_store)
            store = TorchStoreAdapter(start, watch)
            with shared_failure(store, rank):
                comm = _connect(rank, size, config, start, store, watch)
            remember(comm, start)
            return comm
        except dist.DistNetworkError as error:
            deadline = time.monotonic() + EXIT
            while time.monotonic() < deadline:
                watch.check()
                time.sleep(0.02)
            raise _store_lost(error) from None


def _store_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the store of torch.distributed is lost: {error}")


def _connect(
    rank: int, size: int, config: Config, start: Store, store: "TorchStoreAdapter", watch: ProcessWatch
) -> Communicator:
    mine = {"process": process_id(), "host": [host_id(), config.host_id]}
    timeout = config.start_limit + (REPORT_TIMEOUT if rank else 0.0)
    ranks = all_gather_facts(store, "process", rank, size, mine, timeout)
    for other, facts in enumerate(ranks):
        if facts["host"][0] == host_id() and other != rank:
            watch.add(other, facts["process"], now=True)
    hosts = {tuple(facts["host"]) for facts in ranks}
    comm = connect_ranks(rank, size, store, config, hosts=len(hosts) > 1)
    # The store may live in rank 0, which leaves last.
    store.set(f"{rank} is connected", b"")
    if rank == 0:
        _await_connected(size, config.start_limit, start, store, watch)
    return comm


def _await_connected(size: int, timeout: float, start: Store, store: "TorchStoreAdapter", watch: ProcessWatch) -> None:
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


def _agree(store: Store, rank: int, size: int, timeout: float, watch: ProcessWatch) -> str:
    """Agree on the name of this start of these ranks."""
    agreement = Agreement(store, rank, size, timeout, watch)
    if rank:
        return agreement.follow()
    try:
        return agreement.lead()
    except RingcommError as error:
        TorchStoreAdapter(c10d.PrefixStore(agreement.name, store), watch).abort(error)  # for the ranks that have joined
        raise


class TorchStoreAdapter:
    """A store of torch as a ringcomm.bootstrap.store.Store."""

    members = ()  # torch names ranks as its group numbers them, and says which group that is

    def __init__(self, store: Store, watch: ProcessWatch) -> None:
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
