"""A start through keys that another library serves, as torch's store and Ray's: rank 0 publishes where it serves it.

The keys may hold what an earlier start has left: torch reuses the names of groups after destroy_process_group, and
torchrun the whole store after a restart. At the address of such a start nothing listens any more, or nothing that knows
its secret, and a process joins no start twice: a rank then looks again, after pauses that grow, so that the requests
stay few. Why a start has failed counts only where its rank 0 is known to run.
"""

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from ringcomm.bootstrap.endpoint import Endpoint
from ringcomm.bootstrap.place import UNIX, Place, host_id, is_between_hosts
from ringcomm.bootstrap.processes import is_running, process_id
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.start_errors import lost_in_start
from ringcomm.bootstrap.store import Store, as_failure, ranks_of_host, serve_or_join
from ringcomm.bootstrap.wire import addresses, tcp, unix
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT
from ringcomm.bootstrap.wire.peers import Gate
from ringcomm.bootstrap.wire.shared_port import open_gate
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, PeerLost, RingcommError, decode_error, encode_error

__all__ = ["Keys", "Rendezvous"]

KEY = "ringcomm"  # where the start is served
SESSION = "keys"
EXIT = 1.0  # seconds for a process to end after it has closed its connections, on a loaded machine
LONGEST_PAUSE = 0.5  # seconds between two attempts to join
CONNECT_TIMEOUT = 0.5  # seconds for the first one at an address: the host there may be switched off, and a new one come

# Ranks of this process, and the secrets of their last starts, which they have left. The servers of older ones have
# ended.
_left: deque[tuple[int, str]] = deque(maxlen=1024)


class Keys(Protocol):
    """What is published, under names that no other job has; a part of torch's Store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these have been set."""


class Rendezvous:
    """Where a start is served, as one of its ranks publishes or finds it.

    Attributes:
        server: where the keys are served to several hosts; "" if that is not known
        secret: of the start
        hosts: whether its ranks are on several hosts, once they have met
        unreachable: the error of ranks on other hosts, in rank 0, if they cannot reach it
    """

    def __init__(self, keys: Keys, server: str, rank: int, size: int, config: Config) -> None:
        self._keys, self._rank, self._size, self._config = keys, rank, size, config
        self.server, self.hosts = server, False
        self.secret = "" if rank else secrets.token_hex(32)
        self.unreachable: ArgumentError | None = None
        self._found: dict[str, str] = {}  # what rank 0, or that of an earlier start, has published
        self._connect_timeout = CONNECT_TIMEOUT  # seconds until its host answers
        self._seen = ""  # a process that has published a start, and ran then
        self._told = ""  # the secret of a start whose rank 0 had not heard yet that this rank cannot reach it

    @contextmanager
    def open(self) -> Iterator[Store]:
        """Open the store of the start, in which the body connects the ranks."""
        rank, size, timeout = self._rank, self._size, self._config.start_limit
        endpoint = Endpoint(
            name=f"rank 0 of {size}",
            connect=self.connect,
            rank=0,
            suffix=" during startup",
            address=self.server,
            longest_pause=LONGEST_PAUSE,
        )
        try:
            with serve_or_join(self.serve, endpoint, Place(rank, size, SESSION), timeout) as store:
                look = self.check if self.unreachable else None
                here = ranks_of_host(store, rank, size, self._config.host_id, timeout, look)
                self.hosts = len(here) < size
                yield store
        finally:
            _left.append((rank, self.secret))

    def serve(self) -> Server:
        """Serve the start, in rank 0."""
        try:
            with ExitStack() as failed:
                gate, address = self._listen()
                failed.enter_context(gate.listeners[0])  # so that who has connected already looks again
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
            address = addresses.scoped_as(where["address"], self._route)
            tls = find_identity(self._config.tls)
            return tcp.connect(address, secret, seconds, keepalive, self._connect_timeout, tls)
        except ArgumentError as error:
            if error.argument == "tls":
                raise
            raise ConnectionError(f"what listens at {where['address']} has another secret") from None

    def check(self) -> None:
        """Raise what a rank on another host has found, in rank 0."""
        if self._keys.check([self._failure_key]):
            self._keys.set(self._heard_key, "")
            raise decode_error(self._keys.get(self._failure_key))

    def rank_0_lost(self) -> PeerLost | None:
        """Return the error of rank 0's end, if its process is seen to end: it may have served the keys."""
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
        self._keys.set(KEY, json.dumps({"address": address, **here, **failures}))

    def _look(self) -> dict[str, str]:
        """Return what is published now."""
        found = json.loads(self._keys.get(KEY)) if self._found or self._keys.check([KEY]) else {}
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
            heard = self._keys.check([self._heard_key])
            known = heard and self._told == self.secret
            if not heard:
                self._told = self.secret
                self._keys.set(self._failure_key, failure)
        if failure and known:
            raise decode_error(failure)
        if failure:
            raise ConnectionError(f"a start has failed there: {decode_error(failure)}")
        if here and not runs and process == self._seen:
            raise _lost(process)

    def _listen(self) -> tuple[Gate, str]:
        """Listen at the address that is set, else where the keys are reached, else at that of this host.

        If no other host reaches it, listen at a Unix socket, whose peers show their user. Return the address, too.
        """
        config, found, refused = self._config, "", None
        settings = addresses.reach_of(config, self._route)
        for host in filter(None, (settings.hosts[0], self._route(), os.uname().nodename)):
            if found := addresses.loopback(host):
                break
            reach = replace(settings, hosts=[host], bound=settings.bound[:1] if settings.mapped else [host])
            try:
                purpose = f"rank 0: the address of this host ({reach.setting})"
                gate = open_gate(reach, purpose, self.secret.encode(), config.keepalive, 0)
                return gate, reach.addresses(gate.addresses)[0]
            except ArgumentError as error:  # of a setting the transport says so, on all ranks
                refused = error
        full = refused if settings.ports and not found else None
        self.unreachable = full or addresses.unreachable(0, host, found)
        return unix.UnixGate(unix.user_address(self.secret), "the start"), UNIX + unix.user_address(self.secret)

    def _route(self) -> str:
        """Return the address from which this host reaches the keys; "" if that cannot be found."""
        with suppress(OSError, OverflowError, ValueError):  # no such name, no route, no port
            return addresses.local_address(self.server) if self.server else ""
        return ""


def _lost(process: str) -> PeerLost:
    return lost_in_start(0, f"process {process.split()[-2]}")
