"""The mesh: connections between ranks on different hosts, on each of which both have proved to be ranks of the job.

Every rank listens at an address that it tells all others through the store, as long as its mesh is open, so that any
two ranks can connect at any time. The secret of their handshake is that of the mesh, followed by the number of the rank
that listens, so that no rank is taken for another. Then the one that connects sends its number, and waits until the
other has taken the connection. If two ranks connect to each other at once, that of the higher one is taken.
"""

import socket
import struct
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ringcomm.bootstrap.start_errors import missing_connections, rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE, client_handshake
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.tcp import TcpGate, split_address
from ringcomm.bootstrap.wire.unix import close_descriptors
from ringcomm.machine import descriptors

__all__ = ["Mesh", "connect_mesh"]

ADDRESSES = "mesh"  # in the store
SLICE = 0.05  # seconds between looks at the store's failure, and between two attempts to connect to a rank
RANK = struct.Struct("!I")
TAKEN = b"taken"


def connect_mesh(
    rank: int, size: int, peers: Collection[int], store: Store, address: str, secret: bytes, timeout: float
) -> "Mesh":
    """Return a mesh in which this rank is connected to the `peers`, which have it among theirs.

    `address` is that of this host, without a port, at which the others reach this rank; it may differ per rank. All
    ranks know the `secret`.

    Raises CollectiveTimeout naming the peers that have not connected within `timeout` seconds, and what another rank
    has told the store.
    """
    descriptors.provide(rank, size, store.members)
    deadline = time.monotonic() + timeout
    with ExitStack() as failed:
        mesh = Mesh(rank, size, store.members, address, secret)
        failed.callback(mesh.close)
        mesh.addresses = all_gather_facts(
            store, ADDRESSES, rank, size, mesh.address, timeout, meanwhile=lambda: mesh.serve(0)
        )
        for peer in peers:
            if peer < rank:
                mesh.connect_to(peer)
        while missing := [peer for peer in peers if peer not in mesh.connected]:
            left = deadline - time.monotonic()
            if left <= 0:
                failed_at = [each for each in missing if each in mesh.failures]
                reasons = [f"\nrank {rank_in_job(store.members, each)} {mesh.reason(each)}" for each in failed_at]
                raise missing_connections(missing, rank, size, timeout, store.members, "".join(reasons))
            store.check()
            mesh.serve(min(SLICE, left))
        failed.pop_all()
    return mesh


class _Attempt(NamedTuple):
    """A connection on which the handshake has not ended."""

    rank: int
    steps: Generator[bytes, bytes, None]


class Mesh:
    """This rank's end of the mesh.

    Attributes:
        address: Where this rank listens.
        addresses: Those of all ranks.
        connected: For each rank whose connection nobody has taken over yet the descriptor of a TCP socket, which does
            not block.
        failures: Why the last attempt to connect to a rank has failed.
    """

    def __init__(self, rank: int, size: int, members: Sequence[int], address: str, secret: bytes) -> None:
        self._rank, self._size, self._secret = rank, size, secret
        number = rank_in_job(members, rank)
        purpose = f"rank {number}: the address of this host (RINGCOMM_HOST_ADDRESS)"
        gate = TcpGate(f"{address}:0", purpose, self._secret_of(rank), None)
        self.server = PeerServer(gate, self._receive, number)
        self.address = gate.address
        self.addresses: list[str] = []
        self.connected: dict[int, int] = {}
        self.failures: dict[int, OSError] = {}
        self._attempts: dict[MessageSocket, _Attempt] = {}
        self._due: dict[int, float] = {}  # the ranks to connect to, and from when on
        self._taken: set[int] = set()  # the ranks whose connections are in use

    def close(self) -> None:
        self.server.close()
        close_descriptors(self.connected.values())

    def connect_to(self, rank: int) -> None:
        """Connect to another rank, in `serve`, and again if that fails."""
        if rank not in self.connected and rank not in self._taken:
            self._due[rank] = 0.0

    def give_up(self, rank: int) -> None:
        """Stop connecting to a rank."""
        self._due.pop(rank, None)
        for peer in [peer for peer, attempt in self._attempts.items() if attempt.rank == rank]:
            del self._attempts[peer]
            self.server.drop(peer)

    def reaches(self, rank: int) -> bool:
        """Return whether the host of a rank to which this one connects has answered."""
        return any(attempt.rank == rank and _established(peer) for peer, attempt in self._attempts.items())

    def take(self) -> dict[int, int]:
        """Return the new connections; the caller owns them from now on."""
        taken, self.connected = self.connected, {}
        self._taken.update(taken)
        return taken

    def reason(self, rank: int) -> str:
        """Say why this rank is not connected to another one."""
        error = self.failures.get(rank)
        return f"at {self.addresses[rank]}: {(error.strerror or error) if error else 'no answer'}"

    def serve(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, for what other ranks send, and handle it."""
        now = time.monotonic()
        for rank in [rank for rank, due in self._due.items() if due <= now]:
            self._begin(rank)
        left = [max(0.0, due - now) for due in self._due.values()]
        self.server.serve(min([timeout, *left] if timeout is not None else left, default=None))

    def _secret_of(self, rank: int) -> bytes:
        """Return what a connection to this rank is authenticated by."""
        return self._secret + RANK.pack(rank)

    def _begin(self, rank: int) -> None:
        try:
            peer = _connect(self.addresses[rank])
        except OSError as error:
            self._retry(rank, error)
            return
        self.server.add(peer)
        steps = self._introduction(rank)
        next(steps)
        self._attempts[peer] = _Attempt(rank, steps)
        del self._due[rank]

    def _introduction(self, rank: int) -> Generator[bytes, bytes, None]:
        yield from client_handshake(self._secret_of(rank))
        if (yield RANK.pack(self._rank)) != TAKEN:
            raise ConnectionResetError("it closed the connection")

    def _retry(self, rank: int, error: OSError) -> None:
        self.failures[rank] = error
        self._due[rank] = time.monotonic() + SLICE

    def _receive(self, peer: MessageSocket) -> None:
        """Hear a rank to which this one connects, or the number of one that connects."""
        if peer in self._attempts:
            self._advance(peer)
            return
        try:
            (rank,) = RANK.unpack(peer.recv(RANK.size))
        except BlockingIOError:
            return
        except (OSError, struct.error):
            rank = self._rank
        if rank == self._rank or rank >= self._size or rank in self._taken:
            self.server.refuse(peer, "it sent no number of a rank that is not connected")
        elif rank < self._rank and any(attempt.rank == rank for attempt in self._attempts.values()):
            self.server.drop(peer)  # this rank connects to it
        else:
            self.give_up(rank)
            with suppress(OSError):  # it has disconnected; whoever takes the connection reads that
                peer.send(TAKEN)
            self._end(rank, peer)

    def _advance(self, peer: MessageSocket) -> None:
        rank, steps = self._attempts[peer]
        try:
            try:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
            except StopIteration:
                del self._attempts[peer]
                self._end(rank, peer)
        except BlockingIOError:
            return
        except OSError as error:
            del self._attempts[peer]
            self.server.drop(peer)
            self._retry(rank, error)

    def _end(self, rank: int, peer: MessageSocket) -> None:
        close_descriptors([self.connected.pop(rank, -1)])  # it has given an earlier connection up
        self.failures.pop(rank, None)
        self.connected[rank] = self.server.release(peer)


def _established(connecting: socket.socket) -> bool:
    try:
        connecting.getpeername()
    except OSError:
        return False
    return True


def _connect(address: str) -> MessageSocket:
    """Return a socket that begins to connect; a later failure is read from it."""
    host, port = split_address(address)
    family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with ExitStack() as failed:
        peer = MessageSocket(failed.enter_context(socket.socket(family, kind, protocol)))
        failed.enter_context(peer)
        peer.setblocking(False)
        with suppress(BlockingIOError):
            peer.connect(resolved)
        failed.pop_all()
    return peer
