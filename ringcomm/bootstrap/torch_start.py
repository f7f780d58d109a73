"""A start through a store of torch.distributed: rank 0 serves it, and the store of torch says where.

The store may hold what an earlier start has left: torch reuses the names of groups after destroy_process_group, and
torchrun the whole store after a restart. At the address of such a start nothing listens any more, or nothing that knows
its secret, and a process joins no start twice: a rank then looks again, after pauses that grow, so that the requests to
the store of torch stay few. Why a start has failed counts only where its rank 0 is known to run. Only this module of
those below ringcomm.torch imports torch; who imports it is about to use such a store.
"""

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcomm.bootstrap.endpoint import Endpoint
from ringcomm.bootstrap.place import UNIX, Place, host_id, is_between_hosts, master_address
from ringcomm.bootstrap.processes import is_running, process_id
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.store import Store, as_failure, ranks_of_host, serve_or_join
from ringcomm.bootstrap.wire import tcp, unix
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT
from ringcomm.bootstrap.wire.peers import Gate
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, PeerLost, RingcommError, decode_error, encode_error

__all__ = ["TorchStart", "start_through", "start_under_torchrun", "store_lost"]

c10d: Any = dist.distributed_c10d
TorchStore = Any

KEY = "ringcomm"  # where the start is served, in the store of torch
SESSION = "torch"
EXIT = 1.0  # seconds for a process to end after it has closed its connections, on a loaded machine
LONGEST_PAUSE = 0.5  # seconds between two attempts to join
CONNECT_TIMEOUT = 0.5  # seconds for the first one at an address: the host there may be switched off, and a new one come

# Ranks of this process, and the secrets of their last starts, which they have left. The servers of older ones have
# ended.
_left: deque[tuple[int, str]] = deque(maxlen=1024)


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
    endpoint = Endpoint(
        name=f"rank 0 of {size}",
        connect=start.connect,
        rank=0,
        suffix=" during startup",
        address=start.server,
        longest_pause=LONGEST_PAUSE,
    )
    try:
        with serve_or_join(start.serve, endpoint, Place(rank, size, SESSION), timeout) as store:
            look = start.check if start.unreachable else None
            here = ranks_of_host(store, rank, size, config.host_id, timeout, look)
            named = c10d.PrefixStore(start.secret, torch_store)
            yield TorchStart(rank, size, store, named, len(here) < size)
    except dist.DistNetworkError as error:
        raise start.rank_0_lost() or store_lost(error) from None
    finally:
        _left.append((rank, start.secret))


def store_lost(error: Exception) -> PeerLost:
    return PeerLost(f"the store of torch.distributed is lost: {error}")


class _Rendezvous:
    """Where a start is served, as one of its ranks publishes or finds it.

    Attributes:
        server: where torch's store is served to several hosts; "" if it is not
        secret: of the start
        unreachable: the error of ranks on other hosts, in rank 0, if they cannot reach it
    """

    def __init__(self, torch_store: TorchStore, rank: int, size: int, config: Config) -> None:
        self._store, self._rank, self._size, self._config = torch_store, rank, size, config
        self.server = _address_of(torch_store) or master_address()
        self.secret = "" if rank else secrets.token_hex(32)
        self.unreachable: ArgumentError | None = None
        self._tls = find_identity(config.tls)
        self._found: dict[str, str] = {}  # what rank 0, or that of an earlier start, has published
        self._connect_timeout = CONNECT_TIMEOUT  # seconds until its host answers
        self._seen = ""  # a process that has published a start, and ran then
        self._told = ""  # the secret of a start whose rank 0 had not heard yet that this rank cannot reach it

    def serve(self) -> Server:
        """Serve the start, in rank 0."""
        try:
            with ExitStack() as failed:
                gate = self._listen()
                failed.enter_context(gate.listeners[0])  # so that who has connected already looks again
                address = gate.address if isinstance(gate, tcp.TcpGate) else UNIX + unix.user_address(self.secret)
                self._publish(address=address, elsewhere=self.unreachable)
                server = Server(gate, 0, main=(SESSION, Start(self._size)), linger=self._config.start_limit)
                failed.pop_all()
            return server
        except (RingcommError, OSError) as error:
            self._publish(failure=as_failure(error, 0))
            raise

    def connect(self, seconds: float) -> MessageSocket:
        """Connect to rank 0; raise ConnectionError unless it serves a start that this rank has not left yet."""
        where = self._look()
        if not where or (self._rank, where["secret"]) in _left:
            raise ConnectionError("it has not started")
        self.secret = where["secret"]
        self._check_rank_0(where)
        if not is_between_hosts(where["address"]):
            return unix.connect(where["address"].removeprefix(UNIX), seconds, MessageSocket)
        try:
            secret, keepalive = self.secret.encode(), self._config.keepalive
            return tcp.connect(where["address"], secret, seconds, keepalive, self._connect_timeout, self._tls)
        except ArgumentError as error:
            if error.argument == "tls":
                raise
            raise ConnectionError(f"what listens at {where['address']} has another secret") from None

    def check(self) -> None:
        """Raise what a rank on another host has found, in rank 0."""
        if self._store.check([self._failure_key]):
            self._store.set(self._heard_key, "")
            raise decode_error(self._store.get(self._failure_key))

    def rank_0_lost(self) -> PeerLost | None:
        """Return the error of rank 0's end, if its process is seen to end: it may have served the store of torch."""
        deadline = time.monotonic() + EXIT
        while self._seen and time.monotonic() < deadline:
            if not is_running(self._seen):
                return _lost(self._seen)
            time.sleep(0.02)
        return None

    @property
    def _failure_key(self) -> str:
        return f"{KEY} {self.secret}"

    @property
    def _heard_key(self) -> str:
        """The key that is set once rank 0 knows of that failure: it runs then. Like all keys it outlasts the start."""
        return f"{KEY} {self.secret} heard"

    def _publish(self, address: str = "", **errors: RingcommError | None) -> None:
        """Publish where the start is served, or why not: to all, or to the ranks on other hosts."""
        failures = {name: encode_error(error) for name, error in errors.items() if error}
        here = {"secret": self.secret, "host": host_id(), "process": process_id()}
        self._store.set(KEY, json.dumps({"address": address, **here, **failures}))

    def _look(self) -> dict[str, str]:
        """Return what is published now."""
        found = json.loads(self._store.get(KEY)) if self._found or self._store.check([KEY]) else {}
        self._connect_timeout = (
            min(2 * self._connect_timeout, HANDSHAKE_TIMEOUT) if found == self._found else CONNECT_TIMEOUT
        )
        self._found = found
        return found

    def _check_rank_0(self, where: dict[str, str]) -> None:
        """Raise what rank 0 has published for this rank, or that its process has ended.

        Raises ConnectionError if that may be of an earlier start: its rank 0 is not known to run.
        """
        here, process = where["host"] == host_id(), where["process"]
        runs = here and is_running(process)
        if runs and process != process_id():
            self._seen = process
        known = runs or process == self._seen
        failure = where.get("failure", "")
        if not failure and not here and (failure := where.get("elsewhere", "")):
            heard = self._store.check([self._heard_key])
            known = heard and self._told == self.secret
            if not heard:
                self._told = self.secret
                self._store.set(self._failure_key, failure)
        if failure and known:
            raise decode_error(failure)
        if failure:
            raise ConnectionError(f"a start has failed there: {decode_error(failure)}")
        if here and not runs and process == self._seen:
            raise _lost(process)

    def _listen(self) -> Gate:
        """Listen at the address that is set, else where the store of torch is reached, else at that of this host.

        If no other host reaches it, listen at a Unix socket, whose peers show their user.
        """
        found = host = ""
        for host in filter(None, (self._config.host_address, self._route(), os.uname().nodename)):
            if found := tcp.loopback(host):
                break
            with suppress(ArgumentError):  # of a setting the transport says so, on all ranks
                secret, keepalive = self.secret.encode(), self._config.keepalive
                return tcp.TcpGate(f"{host}:0", "the start", secret, keepalive, tls=self._tls)
        self.unreachable = tcp.unreachable(0, host, found)
        return unix.UnixGate(unix.user_address(self.secret), "the start")

    def _route(self) -> str:
        """Return the address from which this host reaches the store of torch; "" if that cannot be found."""
        with suppress(OSError, OverflowError, ValueError):  # no such name, no route, no port
            return tcp.local_address(self.server) if self.server else ""
        return ""


def _lost(process: str) -> PeerLost:
    return lost_in_start(0, f"process {process.split()[-2]}")


def _address_of(store: TorchStore) -> str:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else ""  # a TCPStore
