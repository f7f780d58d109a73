"""A start through a store of torch.distributed: rank 0 serves it, and the store of torch says where.

The store may hold what an earlier start has left: torch reuses the names of groups after destroy_process_group, and
torchrun the whole store after a restart. At the address of such a start nothing listens any more, or nothing that knows
its secret, and a process joins no start twice: a rank then looks again. Only this module of those below
ringcomm.torch imports torch; who imports it is about to use such a store.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm.bootstrap.client import Endpoint
from ringcomm.bootstrap.facts import all_gather_facts
from ringcomm.bootstrap.place import Place, host_id, master_address
from ringcomm.bootstrap.processes import is_running, process_id
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.store import Store, serve_or_join
from ringcomm.bootstrap.wire import tcp
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, PeerLost

__all__ = ["TorchStart", "start_through", "start_under_torchrun", "store_lost"]

c10d: Any = dist.distributed_c10d
TorchStore = Any

KEY = "ringcomm"  # where the start is served, in the store of torch
SESSION = "torch"
REPORT_TIMEOUT = 1.0  # seconds for rank 0 to name the ranks that did not join

_joined: set[tuple[int, str]] = set()  # ranks of this process, and the secrets of their starts


class TorchStart(NamedTuple):
    """A start: its store, torch's under a name that no other start has, and whether its ranks are on several hosts."""

    rank: int
    size: int
    store: Store
    torch_store: TorchStore
    hosts: bool


@contextmanager
def start_under_torchrun(config: Config) -> Iterator[TorchStart]:
    """Start through the store that torchrun serves; see start_through."""
    torch_store, rank, size = next(c10d.rendezvous("env://", timeout=timedelta(seconds=config.start_limit)))
    with start_through(c10d.PrefixStore("ringcomm.init", torch_store), rank, size, config) as start:
        yield start


@contextmanager
def start_through(torch_store: TorchStore, rank: int, size: int, config: Config) -> Iterator[TorchStart]:
    """Start through a store of torch: the body connects the ranks. Raises PeerLost if that store is lost."""
    start, timeout = _Rendezvous(torch_store, rank, size, config), config.start_limit
    endpoint = Endpoint(f"rank 0 of {size}", start.connect, rank=0, suffix=" during startup", address=start.server)
    try:
        with serve_or_join(start.serve, endpoint, Place(rank, size, SESSION), timeout) as store:
            mine = [host_id(), config.host_id]
            hosts = all_gather_facts(store, "host", rank, size, mine, timeout + (REPORT_TIMEOUT if rank else 0.0))
            named = c10d.PrefixStore(start.secret, torch_store)
            yield TorchStart(rank, size, store, named, len({*map(tuple, hosts)}) > 1)
    except dist.DistNetworkError as error:
        raise store_lost(error) from None


def store_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the store of torch.distributed is lost: {error}")


class _Rendezvous:
    """Where a start is served, as one of its ranks publishes or finds it.

    Attributes:
        server: where torch's store is served to several hosts; "" if it is not
        secret: of the start
    """

    def __init__(self, torch_store: TorchStore, rank: int, size: int, config: Config) -> None:
        self._store, self._rank, self._size, self._config = torch_store, rank, size, config
        self.server = _address_of(torch_store) or master_address()
        self.secret = "" if rank else secrets.token_hex(32)
        self._seen = ""  # a process that has published a start, and ran then

    def serve(self) -> Server:
        """Serve the start, in rank 0."""
        gate = self._listen()
        where = {"address": gate.address, "secret": self.secret, "host": host_id(), "process": process_id()}
        self._store.set(KEY, json.dumps(where))
        return Server(gate, 0, main=(SESSION, Start(self._size)))

    def connect(self, seconds: float) -> MessageSocket:
        """Connect to rank 0; raise ConnectionError unless it serves a start that this rank has not joined yet."""
        where = json.loads(self._store.get(KEY)) if self._store.check([KEY]) else None
        if where is None or (self._rank, where["secret"]) in _joined:
            raise ConnectionError("it has not started")
        if where["host"] == host_id():
            if is_running(where["process"]):
                self._seen = where["process"]
            elif where["process"] == self._seen:
                raise lost_in_start(0, f"process {self._seen.split()[-2]}")
        try:
            found = tcp.connect(where["address"], where["secret"].encode(), seconds)
        except ArgumentError:
            raise ConnectionError(f"what listens at {where['address']} has another secret") from None
        self.secret = where["secret"]
        _joined.add((self._rank, self.secret))
        return found

    def _listen(self) -> tcp.TcpGate:
        """Listen at the address that is set, else where the store of torch is reached, else at any of this host."""
        route = tcp.local_address(self.server) if self.server else ""
        for host in filter(None, (self._config.host_address, route, os.uname().nodename)):
            with suppress(ArgumentError):  # of a setting the transport says so, on all ranks
                return tcp.TcpGate(f"{host}:0", "the start", self.secret.encode(), KEEPALIVE)
        return tcp.TcpGate("127.0.0.1:0", "the start", self.secret.encode(), KEEPALIVE)


def _address_of(store: TorchStore) -> str:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else ""  # a TCPStore
