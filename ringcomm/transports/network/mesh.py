"""The mesh: connections between ranks on different hosts, on each of which both have proved to be ranks of the job.

Every rank listens at each address of its host, which it tells all others through the store, as long as its mesh is
open, so that any two ranks can connect at any time. The secret of their handshake is that of the mesh, followed by the
number of the rank that listens, so that no rank is taken for another. If two ranks connect to each other at once, the
lower one gives its attempt up. attempt.py has what they send.

Two connected ranks may make flows, further connections for their large data: flow number f between the addresses number
f of their hosts, counted around. The higher rank makes them. A flow that cannot be made is logged, and not missed.

A rank that cannot be reached has closed, or died, or is slow: search.py finds out, by questions to the other ranks of
its host. They travel as connections do, but name the rank that they are about.
"""

import errno
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ringcomm.bootstrap.start_errors import rank_in_job
from ringcomm.bootstrap.wire.addresses import Reach, scoped_as
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT
from ringcomm.bootstrap.wire.keepalive import patience_with, probe
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.shared_port import open_gate
from ringcomm.bootstrap.wire.tcp import begin_to_connect, is_established
from ringcomm.bootstrap.wire.tls import TlsFailure
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.machine import descriptors
from ringcomm.transports.network.attempt import ACCEPTED, CONNECTING, HELLO, Attempt, secret_of
from ringcomm.transports.network.host_layout import HostLayout
from ringcomm.transports.network.search import RUNS, Search

__all__ = ["Mesh"]

log = logging.getLogger("ringcomm")


class Mesh:
    """This rank's end of the mesh.

    Attributes:
        rank, size: Of this rank among those that connect; in the job it is rank `number`.
        own: The addresses at which others reach this rank.
        addresses: Those of all ranks.
        connected: For each rank whose connection nobody has taken over yet its socket, which does not block, and probes
            the other host.
        flows: The rank, and the socket, of each flow that nobody has taken over yet.
        ended: What has become of ranks that cannot be reached: LEFT, or why they are lost.
        failures: Why the last attempt to connect to a rank has failed.
    """

    def __init__(
        self, layout: HostLayout, members: Sequence[int], reach: Reach, secret: bytes, keepalive: float
    ) -> None:
        self.rank, self.size = layout.local_ranks[layout.local_rank], sum(map(len, layout.ranks))
        self.number = rank_in_job(members, self.rank)
        self._members, self._layout, self._secret, self._keepalive = members, layout, secret, keepalive
        purpose = f"rank {self.number}: the address of this host ({reach.setting})"
        gate = open_gate(reach, purpose, secret_of(secret, self.rank), None, self.number, len(layout.local_ranks))
        self.server = PeerServer(gate, self._receive, self.number)
        self.own, self._sources, self._tls = reach.addresses(gate.addresses), reach.sources, reach.tls
        self.addresses: list[list[str]] = []
        self.connected: dict[int, MessageSocket] = {}
        self.flows: list[tuple[int, MessageSocket]] = []
        self.ended: dict[int, bytes] = {}
        self.failures: dict[int, OSError] = {}
        self._searches: dict[int, Search] = {}
        self._attempts: dict[MessageSocket, Attempt] = {}
        self._taken: set[int] = set()  # the ranks whose connections are in use, or were made by this rank
        self._state_of: Callable[[int], bytes] | None = None

    def close(self) -> None:
        self.server.close()
        for peer in [*self.connected.values(), *(peer for _, peer in self.flows)]:
            peer.close()

    def number_of(self, rank: int) -> int:
        """Return the number of a rank in the job."""
        return rank_in_job(self._members, rank)

    def find_ended(self, state_of: Callable[[int], bytes]) -> None:
        """From now on find out what has become of ranks that cannot be reached.

        `state_of` says of another rank of this host that it RUNS, or has LEFT, or how it has died.
        """
        self._state_of = state_of

    def connect_to(self, rank: int) -> None:
        """Connect to another rank, in `serve`, and again if that fails."""
        if rank in self.connected or rank in self._taken or rank in self._searches:
            return
        host, _ = self._layout.locate(rank)
        asked = self._layout.ranks[host] if self._state_of else ()  # in a start the store knows
        patience = patience_with(self._keepalive).idle if self._state_of else math.inf
        self._searches[rank] = Search(rank, [each for each in asked if each != rank], patience)

    def add_flow(self, rank: int, flow: int) -> None:
        """Begin to make a flow to a lower rank, to which this one is connected."""
        address = self.addresses[rank][flow % len(self.addresses[rank])]
        expires = time.monotonic() + HANDSHAKE_TIMEOUT
        try:
            peer = begin_to_connect(address, self._keepalive, self._source(flow))
        except OSError as error:
            self._warn(rank, flow, error)
        else:
            self._await(peer, rank, rank, expires, flow)

    def take_flow(self, rank: int, peer: MessageSocket) -> None:
        """Keep the connection of a flow for whoever takes `flows`."""
        with suppress(OSError):
            probe(peer, self._keepalive)
        self.flows.append((rank, self.server.release(peer)))

    def take(self) -> dict[int, MessageSocket]:
        """Return the new connections; the caller owns them from now on."""
        taken, self.connected = self.connected, {}
        self._taken.update(taken)
        return taken

    def reason(self, rank: int) -> str:
        """Say why this rank is not connected to another one."""
        error = self.failures.get(rank)
        return f"at {self.addresses[rank][0]}: {(error.strerror or error) if error else 'no answer'}"

    def know(self, addresses: Sequence[str]) -> None:
        """Take the addresses of all ranks, of each with commas between them, as those name them."""
        self.addresses = [
            [scoped_as(address, partial(self._source, i)) for i, address in enumerate(each.split(","))]
            for each in addresses
        ]

    def _source(self, flow: int) -> str:
        return self._sources[flow % len(self._sources)]

    def serve(self, timeout: float = math.inf) -> None:
        """Wait up to `timeout` seconds for what other ranks send, and handle it.

        Raises RingcommError if this process has no descriptor left.
        """
        now = time.monotonic()
        for peer in [peer for peer, attempt in self._attempts.items() if attempt.expires <= now]:
            self._fail(peer, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        for rank in [rank for rank, search in self._searches.items() if search.due <= now]:
            self._begin(rank)
        due = [each.due for each in self._searches.values()] + [each.expires for each in self._attempts.values()]
        timeout = min([timeout, *(max(0.0, each - now) for each in due)])
        try:
            self.server.serve(None if timeout == math.inf else timeout)
        except RingcommError as error:
            if self._state_of is None:
                raise
            log.warning("%s", error)  # the server tries again; the rank that connects, too

    # --- This rank connects -------------------------------------------------------------------------------------------

    def _begin(self, rank: int) -> None:
        search = self._searches[rank]
        target, expires = search.next()
        try:
            peer = begin_to_connect(self.addresses[target][0], self._keepalive)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise descriptors.exhausted(self.number, "to connect to another rank", error) from None
            self._failed(target, rank, error)
            return
        self._await(peer, target, rank, expires)

    def _await(self, peer: MessageSocket, target: int, about: int, expires: float, flow: int = 0) -> None:
        self.server.add(peer)
        self._attempts[peer] = Attempt(peer, self._tls, self._secret, self.rank, target, about, expires, flow)

    def _advance(self, peer: MessageSocket) -> None:
        attempt = self._attempts[peer]
        try:
            answer = attempt.advance()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(peer, error)
            return
        if answer is not None:
            del self._attempts[peer]
            self._answered(peer, attempt, answer)

    def _answered(self, peer: MessageSocket, attempt: Attempt, answer: bytes) -> None:
        rank = attempt.about
        if attempt.flow:
            self.take_flow(rank, peer)
            return
        if answer == ACCEPTED:
            self._take(rank, peer)
            self._taken.add(rank)  # the other has this connection, and no other one
            return
        self.server.drop(peer)
        if rank not in self._searches:  # they are connected meanwhile
            return
        if answer in (CONNECTING, RUNS):
            self._searches[rank].again()
        else:
            self._end(rank, answer)

    def _fail(self, peer: MessageSocket, error: OSError) -> None:
        attempt = self._attempts.pop(peer)
        answers = is_established(peer)
        self.server.drop(peer)
        if attempt.flow:
            self._warn(attempt.about, attempt.flow, error)
        else:
            self._failed(attempt.target, attempt.about, error, answers)

    def _warn(self, rank: int, flow: int, error: OSError) -> None:
        level = logging.INFO if isinstance(error, ConnectionError) else logging.WARNING  # as a rule it has closed
        text = "rank %d has no flow %d to rank %d (%s): its large data takes fewer connections"
        log.log(level, text, self.number, flow, self.number_of(rank), error.strerror or error)

    def _failed(self, target: int, rank: int, error: OSError, answers: bool = False) -> None:
        if rank not in self._searches:
            return
        if target == rank:
            self.failures[rank] = error
        if isinstance(error, TlsFailure):  # as each attempt would
            if self._state_of is None:
                text = f"rank {self.number}: cannot connect to rank {self.number_of(target)}"
                raise ArgumentError(f"{text} at {self.addresses[target][0]}: {error}", rank=self.number)
            self._end(rank, f"no connection {self.reason(rank)}".encode())
            return
        ended = self._searches[rank].fail(error, answers)
        if ended is not None:
            self._end(rank, ended or f"no connection {self.reason(rank)}".encode())

    def _end(self, rank: int, how: bytes) -> None:
        del self._searches[rank]
        self.ended[rank] = how

    # --- Others connect -----------------------------------------------------------------------------------------------

    def _receive(self, peer: MessageSocket) -> None:
        """Hear a rank to which this one connects, or the first message of one that connects."""
        if peer in self._attempts:
            self._advance(peer)
            return
        try:
            if not (message := peer.recv(HELLO.size)):  # it has given up, as when it is closing
                self.server.drop(peer)
                return
            rank, about, flow = HELLO.unpack(message)
        except BlockingIOError:
            return
        except (OSError, struct.error):
            rank = self.rank
        if rank == self.rank or rank >= self.size:
            self.server.refuse(peer, "it sent no number of another rank")
        elif about != self.rank:
            self._answer(peer, self._state_of(about) if self._state_of else RUNS)
        elif flow and not (rank in self._taken or rank in self.connected):
            self.server.drop(peer)  # it has been quicker than this rank's own connection
        elif flow:
            with suppress(OSError):
                peer.send(ACCEPTED)
            self.take_flow(rank, peer)
        elif rank in self._taken:  # of two attempts at once, the one that this rank has made is in use
            self.server.drop(peer)
        elif rank < self.rank and any(map(is_established, self._attempts_at(rank))):
            self._answer(peer, CONNECTING)
        else:
            for hopeless in [each for each in self._attempts_at(rank) if not is_established(each)]:
                del self._attempts[hopeless]
                self.server.drop(hopeless)
            with suppress(OSError):  # it has disconnected; whoever takes the connection reads that
                peer.send(ACCEPTED)
            self._take(rank, peer)

    def _attempts_at(self, rank: int) -> list[MessageSocket]:
        return [peer for peer, attempt in self._attempts.items() if attempt.connects and attempt.target == rank]

    def _answer(self, peer: MessageSocket, answer: bytes) -> None:
        with suppress(OSError):
            peer.send(answer)
        self.server.drop(peer)

    def _take(self, rank: int, peer: MessageSocket) -> None:
        for found in (self._searches, self.failures, self.ended):
            found.pop(rank, None)
        with suppress(OSError):
            probe(peer, self._keepalive)
        if rank in self.connected:
            self.connected.pop(rank).close()  # it has given that one up
        self.connected[rank] = self.server.release(peer)
