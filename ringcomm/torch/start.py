"""How the ranks of a torch.distributed group meet: at torch's store, wherever that is."""

import logging
import secrets
import time
from typing import Any

import torch.distributed as dist

from ringcomm.communicator import Communicator
from ringcomm.config import Config, start_logging
from ringcomm.errors import CollectiveTimeout, PeerLost, RingcommError, packed, unpacked
from ringcomm.place import host
from ringcomm.start import connect as connect_ranks
from ringcomm.store import late
from ringcomm.torch.transport import connect as connect_hosts

__all__ = ["TorchStore", "connect"]

log = logging.getLogger("ringcomm")

c10d: Any = dist.distributed_c10d
Store = Any  # of torch

SLICE = 0.1  # seconds between two looks at what else has happened
GRACE = 1.0  # seconds beyond the timeout in which rank 0 says who did not come
FAILURE = "failure"


def connect(options: Any) -> Communicator:
    """Connect the ranks of a group that torch makes, from its DistributedBackendOptions."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
    start = c10d.PrefixStore(_agree(options.store, rank, size, timeout), options.store)
    store = TorchStore(start)
    store.set(f"{rank} is on", host().encode())
    hosts = {store.get(f"{other} is on", timeout + GRACE) for other in range(size)}
    config = Config(timeout=timeout)
    if len(hosts) == 1:
        comm = connect_ranks(rank, size, store, config)
    else:
        start_logging(config.log)
        log.info("the ranks are on %d hosts: they send messages through Gloo", len(hosts))
        try:
            comm = Communicator(connect_hosts(rank, size, start, timeout))
        except RuntimeError as error:
            text = f"rank {rank} could not connect to other hosts through Gloo: {error}"
            raise RingcommError(text, rank=rank) from None
    # The store may live in rank 0: that leaves when the others do not need it any more.
    store.set(f"{rank} is through", b"")
    for other in range(size) if rank == 0 else ():
        store.get(f"{other} is through", timeout)
    return comm


def _agree(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that only this start of these ranks has.

    A store may hold what earlier starts have left: torch uses the names of groups again after destroy_process_group,
    and torchrun the whole store after a restart. So each rank makes itself a name, and rank 0 answers to names until
    all ranks have understood: nothing old can be mistaken for that.
    """
    name = secrets.token_hex(8)
    deadline = time.monotonic() + timeout
    if rank > 0:
        store.set(f"{rank} is", name)
        while not _wait(store, f"start of {rank}, {name}", deadline):
            if time.monotonic() >= deadline:
                raise late([0], size, timeout)
        start: str = store.get(f"start of {rank}, {name}").decode()
        store.set(f"{rank} understood {start}", b"")
        return start
    missing = set(range(1, size))
    known: dict[int, bytes] = {}
    pause = 0.0005
    while missing:
        for other in sorted(missing):
            if not store.check([f"{other} is"]):
                continue
            theirs = store.get(f"{other} is")
            if theirs != known.get(other):
                store.set(f"start of {other}, {theirs.decode()}", name)
                known[other] = theirs
            elif store.check([f"{other} understood {name}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            error = late(missing, size, timeout)
            TorchStore(c10d.PrefixStore(name, store)).abort(error)  # for those who have come
            raise error
        time.sleep(pause)  # a store of torch cannot be waited for: see _wait
        pause = min(2 * pause, 0.02)
    return name


def _wait(store: Store, key: str, deadline: float) -> bool:
    """Wait until a key is set, for a slice; say whether it is. Torch's own wait does not look at signals, and logs."""
    deadline = min(deadline, time.monotonic() + SLICE)
    pause = 0.0005
    try:
        while not store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    except dist.DistNetworkError as error:
        raise PeerLost(f"the store of torch.distributed has gone: {error}") from None
    return True


class TorchStore:
    """A store of torch as ringcomm uses one (ringcomm.store.Store)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not _wait(self._store, key, deadline):
            self.check()
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
        self.check()
        return bytes(self._store.get(key))

    def abort(self, error: RingcommError) -> None:
        self._store.set(FAILURE, packed(error))

    def check(self) -> None:
        if self._store.check([FAILURE]):
            raise unpacked(self._store.get(FAILURE))
