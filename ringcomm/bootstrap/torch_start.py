"""A start through a store of torch.distributed, also that of torchrun.

Only this module of those below ringcomm.torch imports torch; who imports it is about to use such a store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm.bootstrap.place import master_address
from ringcomm.bootstrap.rendezvous import Rendezvous
from ringcomm.bootstrap.store import Store
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost

__all__ = ["TorchStart", "start_in_environment", "start_through", "store_lost"]

c10d: Any = dist.distributed_c10d
TorchStore = Any

_last_store: TorchStore = None  # of the last start in the environment: without it, torch ends what this process serves


class TorchStart(NamedTuple):
    """A start: its store, torch's under a name that no other start has, and whether its ranks are on several hosts."""

    rank: int
    size: int
    store: Store
    torch_store: TorchStore
    hosts: bool


@contextmanager
def start_in_environment(config: Config) -> Iterator[TorchStart]:
    """Start through the store at MASTER_ADDR and MASTER_PORT; see start_through.

    torchrun serves it, or else rank 0, until it exits: the others may need it for their next start.
    """
    global _last_store
    try:
        torch_store, rank, size = next(c10d.rendezvous("env://", timeout=timedelta(seconds=config.start_limit)))
    except (dist.DistError, ValueError) as error:
        kind = CollectiveTimeout if "timed out" in str(error) else ArgumentError
        reason = str(error).partition("\n")[0]
        raise kind(f"cannot open the store of torch.distributed at {master_address()}: {reason}") from None
    _last_store = torch_store
    with start_through(c10d.PrefixStore("ringcomm.init", torch_store), rank, size, config) as start:
        yield start


@contextmanager
def start_through(torch_store: TorchStore, rank: int, size: int, config: Config) -> Iterator[TorchStart]:
    """Start through a store of torch: the body connects the ranks. Raises PeerLost if that store is lost."""
    start = Rendezvous(torch_store, _address_of(torch_store) or master_address(), rank, size, config)
    try:
        with start.open() as store:
            yield TorchStart(rank, size, store, c10d.PrefixStore(start.secret, torch_store), start.hosts)
    except dist.DistNetworkError as error:
        raise start.rank_0_lost() or store_lost(error) from None


def store_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the store of torch.distributed is lost: {error}")


def _address_of(store: TorchStore) -> str:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else ""  # a TCPStore
