"""The store of ranks on several hosts: `ringcomm run` serves it over TCP, in the launcher of node 0."""

import errno
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ringcomm.bootstrap.keepalive import KEEPALIVE
from ringcomm.bootstrap.messagesocket import hang_up
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.servedstore import JOIN, ServedLastingStore, ServedStore
from ringcomm.bootstrap.servedsurvivors import SURVIVORS, ServedSurvivors
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.sockets import close_in_children
from ringcomm.bootstrap.socketstore import SocketStore
from ringcomm.bootstrap.storeserver import StoreServer
from ringcomm.bootstrap.tcp import connect
from ringcomm.bootstrap.tcpserver import TcpServer
from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost

__all__ = ["NODES", "JobEvent", "LastingStore", "TcpStore", "TcpStoreServer", "broken"]

# The names of the store of the launchers, and of the LastingStore; a store of ranks is named by job and start.
NODES, LASTING = "nodes", "lasting"
REACH_TIMEOUT = 5.0  # seconds to connect to a server that runs
FAILED_STARTS = 100  # the last ones whose failure is kept


class JobEvent(NamedTuple):
    """What node 0 tells the launchers of all nodes."""

    left_out: Sequence[int] = ()  # the ranks that `shrink` has left out
    grow_timed_out: bool = False  # in a rank that was started again

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> "JobEvent":
        return cls(**json.loads(data))


class TcpStore(SocketStore):
    """The store for ranks of several hosts. The constructor returns when this rank has joined."""

    _server_name = "the launcher of node 0"

    def __init__(self, place: Place, timeout: float, keepalive: float = KEEPALIVE) -> None:
        self._keepalive = keepalive
        super().__init__(place, timeout)

    @property
    def place(self) -> Place:
        """That of this process, in the job of this store."""
        return self._place

    def _connect(self, timeout: float) -> socket.socket:
        secret = os.fsencode(self._place.nonce)
        identity = {"store": self._place.job, "process": self._process(), "in_job": self.members}
        return self._join(
            lambda seconds: connect(self._place.store, secret, seconds, self._keepalive),
            json.dumps(identity).encode(),
            timeout,
        )

    def _process(self) -> str:
        return f"process {os.getpid()} on {os.uname().nodename}"

    def _hang_up(self) -> None:
        hang_up(self._socket)

    def _lost(self, error: OSError | None) -> PeerLost:
        return PeerLost(f"the launcher of node 0, which serves the store at {self._place.store}, {broken(error)}")

    def _unreachable(self, timeout: float, reason: str) -> CollectiveTimeout:
        return CollectiveTimeout(f"found no store at {self._place.store} within {timeout:g} s: {reason}")


class LastingStore(TcpStore):
    """A store beside those of the starts, until the job ends: any number of processes join and leave it.

    `patience`: seconds to connect, and for an answer after the time of a question; None: as other stores.
    """

    def __init__(self, place: Place, patience: float | None = None) -> None:
        self._answer_limit = patience
        super().__init__(replace(place, job=LASTING), REACH_TIMEOUT if patience is None else patience)
        close_in_children(self._socket)  # or what this process has set would stay until they end

    def propose(self, key: str, value: bytes) -> None:
        """Set a key for good unless it is set: the first value wins. What `set` has set goes with this connection."""
        self._send(f"propose\0{key}\0".encode() + value)

    def find(self, key: str, timeout: float = 0.0) -> bytes | None:
        """Return the value of a key; None if it is not set within `timeout` seconds.

        Raises CollectiveTimeout if the server does not answer, and PeerLost from then on.
        """
        try:
            return self.get(key, timeout)
        except CollectiveTimeout:
            if self._silent:
                raise
            return None


class TcpStoreServer(StoreServer):
    """Serves the store of the launchers, those that last and, under names of their own, those of starts of ranks."""

    def __init__(self, place: Place, keepalive: float, launchers: ServedStore, process: str) -> None:
        self._keepalive = keepalive
        self._starts: dict[str, ServedStore] = {}
        self._failed: dict[str, ServedStore] = {}  # starts that all have left, for ranks that arrive late
        self._survivors = ServedSurvivors(self._end_start, self._end_ranks)
        self._lasting = ServedLastingStore()
        super().__init__(place, place.store, launchers, process)

    def _listen(self, address: str) -> PeerServer:
        secret = os.fsencode(self._place.nonce)
        return TcpServer(address, "--master-addr", self._receive, None, secret, self._keepalive)

    def _stores(self) -> list[ServedStore]:
        for name, store in [*self._starts.items()]:
            if not store.members and (store.complete or store.failure):
                del self._starts[name]
                if not store.complete:
                    self._failed[name] = store
        while len(self._failed) > FAILED_STARTS:
            del self._failed[next(iter(self._failed))]
        return [self._store, self._survivors, self._lasting, *self._starts.values()]

    def _end_start(self, name: str, size: int, error: PeerLost) -> None:
        self._start(name, size).fail(error)

    def _start(self, name: str, size: int, in_job: Sequence[int] = ()) -> ServedStore:
        return self._failed.get(name) or self._starts.setdefault(name, ServedStore(size, in_job))

    def _end_ranks(self, ranks: list[int]) -> None:
        self._store.push(JobEvent(ranks).encode())

    def _join(self, peer: socket.socket, message: bytes) -> str:
        if len(message) < JOIN.size:
            return "malformed request"
        try:
            rank, size = JOIN.unpack_from(message)
            identity: dict[str, Any] = json.loads(message[JOIN.size :])
            name, process, in_job = str(identity["store"]), str(identity["process"]), [*map(int, identity["in_job"])]
            if len(in_job) not in (0, size):
                raise ValueError(in_job)
        except (ValueError, KeyError, TypeError):
            return "malformed request"
        if name in (SURVIVORS, LASTING):
            store = self._survivors if name == SURVIVORS else self._lasting
            return self._take_in(peer, store, rank, size, process)
        if name != NODES:
            return self._take_in(peer, self._start(name, size, in_job), rank, size, process)
        refusal = self._take_in(peer, self._store, rank, size, process)
        if refusal:
            self._store.fail(ArgumentError(f"{process}: {refusal}"))
        return refusal


def broken(error: OSError | None) -> str:
    """Say how the other end of a TCP connection was lost."""
    unreachable = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return "does not answer" if error and error.errno in unreachable else "has ended"
