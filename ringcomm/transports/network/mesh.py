"""The mesh: one connection between each two ranks on different hosts, on which each has proved to be a rank of the job.

Every rank listens at an address that it tells all others through the store, and connects to the lower ranks. The
secret of their handshake is that of the mesh, followed by the number of the lower rank, so that no rank is taken for
another. Then the higher rank sends its number.
"""

import socket
import struct
import time
from collections.abc import Collection, Generator
from contextlib import ExitStack, closing
from typing import NamedTuple

from ringcomm.bootstrap.start_errors import missing_connections, rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE, client_handshake
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.tcp import TcpGate, split_address
from ringcomm.bootstrap.wire.unix import close_descriptors
from ringcomm.machine import descriptors

__all__ = ["connect_mesh"]

ADDRESSES = "mesh"  # in the store
SLICE = 0.05  # seconds between looks at the store's failure, and between two attempts to connect to a rank
RANK = struct.Struct("!I")


def connect_mesh(
    rank: int, size: int, peers: Collection[int], store: Store, address: str, secret: bytes, timeout: float
) -> list[int]:
    """Return the descriptor of a connected TCP socket for each of the `peers`, -1 for other ranks. They do not block.

    `address` is that of this host, without a port, at which the higher ranks reach this one; it may differ per rank.
    All ranks know the `secret`.

    Raises CollectiveTimeout naming the ranks that have not connected within `timeout` seconds, and what another rank
    has told the store.
    """
    descriptors.provide(rank, size, store.members)
    mesh = _Mesh(rank, size, peers, store, secret, time.monotonic() + timeout)
    with ExitStack() as failed:
        failed.callback(mesh.close)
        mesh.connect(address, timeout)
        failed.pop_all()
    return [mesh.connected.get(other, -1) for other in range(size)]


class _Attempt(NamedTuple):
    """A connection to a lower rank on which the handshake has not ended."""

    rank: int
    steps: Generator[bytes, bytes, None]


class _Mesh:
    def __init__(
        self, rank: int, size: int, peers: Collection[int], store: Store, secret: bytes, deadline: float
    ) -> None:
        self._rank, self._size, self._store, self._secret, self._deadline = rank, size, store, secret, deadline
        self._peers = peers
        self.connected: dict[int, int] = {}
        self._addresses: list[str] = []
        self._attempts: dict[MessageSocket, _Attempt] = {}
        # The lower ranks to connect to, and from when on.
        self._due = {each: 0.0 for each in peers if each < rank}
        self._failures: dict[int, str] = {}  # of the last attempt

    def close(self) -> None:
        close_descriptors(self.connected.values())

    def connect(self, address: str, timeout: float) -> None:
        secret = self._secret_of(self._rank)
        number = self._in_job(self._rank)
        purpose = f"rank {number}: the address of this host (RINGCOMM_HOST_ADDRESS)"
        gate = TcpGate(f"{address}:0", purpose, secret, None)
        self._server = PeerServer(gate, self._receive, number)
        with closing(self._server) as server:
            who = self._rank, self._size
            self._addresses = all_gather_facts(
                self._store, ADDRESSES, *who, gate.address, timeout, meanwhile=lambda: server.serve(0)
            )
            while len(self.connected) < len(self._peers):
                self._store.check()
                self._connect_due()
                server.serve(max(0.0, min(SLICE, self._check_deadline(timeout))))

    def _in_job(self, rank: int) -> int:
        return rank_in_job(self._store.members, rank)

    def _secret_of(self, rank: int) -> bytes:
        """Return what a connection to this rank is authenticated by."""
        return self._secret + RANK.pack(rank)

    def _check_deadline(self, timeout: float) -> float:
        """Return the seconds left."""
        left = self._deadline - time.monotonic()
        if left > 0:
            return left
        missing = [rank for rank in self._peers if rank not in self.connected]
        reasons = [
            f"\nrank {self._in_job(rank)} at {self._addresses[rank]}: {why}" for rank, why in self._failures.items()
        ]
        raise missing_connections(missing, self._rank, self._size, timeout, self._store.members, "".join(reasons))

    def _connect_due(self) -> None:
        for rank, due in [*self._due.items()]:
            if due <= time.monotonic():
                self._connect_to(rank)

    def _connect_to(self, rank: int) -> None:
        host, port = split_address(self._addresses[rank])
        family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        peer = MessageSocket(socket.socket(family, kind, protocol))
        peer.setblocking(False)
        try:
            peer.connect(resolved)
        except BlockingIOError:
            pass  # a later failure is read
        except OSError as error:
            peer.close()
            self._retry(rank, error)
            return
        self._server.add(peer)
        steps = client_handshake(self._secret_of(rank))
        next(steps)
        self._attempts[peer] = _Attempt(rank, steps)
        del self._due[rank]

    def _retry(self, rank: int, error: OSError) -> None:
        self._failures[rank] = error.strerror or str(error)
        self._due[rank] = time.monotonic() + SLICE

    def _receive(self, peer: MessageSocket) -> None:
        """Hear a lower rank in the handshake, or the number of a higher one after it."""
        if peer in self._attempts:
            self._advance(peer)
            return
        try:
            (rank,) = RANK.unpack(peer.recv(RANK.size))
        except BlockingIOError:
            return
        except (OSError, struct.error):
            rank = self._rank
        if rank > self._rank and rank in self._peers:
            close_descriptors([self.connected.pop(rank, -1)])  # it has given an earlier connection up
            self.connected[rank] = self._server.release(peer)
        else:
            self._server.refuse(peer, "it sent no number of a higher rank")

    def _advance(self, peer: MessageSocket) -> None:
        rank, steps = self._attempts[peer]
        try:
            try:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
            except StopIteration:
                peer.send(RANK.pack(self._rank))
                del self._attempts[peer]
                self.connected[rank] = self._server.release(peer)
        except BlockingIOError:
            return
        except OSError as error:
            del self._attempts[peer]
            self._server.drop(peer)
            self._retry(rank, error)
