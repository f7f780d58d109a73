"""The rendezvous of the ranks of one host: rank 0 collects their hellos and sends file descriptors back.

Rank 0 listens at a socket with a random name, and publishes that name and a secret in the store. Then:

    each rank → rank 0    the secret, its hello, its own pidfd             rank 0 waits for all
    rank 0 → each rank    the reply, all process ids, the memory, the pidfds of the other processes
    each rank → rank 0    "ready": it has mapped the memory                rank 0 waits for all
    rank 0 → each rank    "go"

Every rank holds its connection until "go", so rank 0 notices at once when one dies. A failure before "go" aborts the
store, and with it the rendezvous of every rank, with the same error: a rank that loses its connection reads the reason
from the store.
"""

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from ringcomm.bootstrap.arrivals import arrival_timeout, rank_in_job
from ringcomm.bootstrap.process_watch import open_pidfd
from ringcomm.bootstrap.store import Store, shared_failure
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.unix import (
    MAX_DESCRIPTORS,
    Facts,
    UnixGate,
    close_descriptors,
    credentials,
    packet_socket,
    receive_packet,
    send_packet,
    untrusted_reason,
)
from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.machine import descriptors

__all__ = ["REPORT_TIMEOUT", "Rendezvous", "rendezvous"]

KEY = "rendezvous"
SLICE = 0.1  # seconds between checks of the store: an abort there does not wake rank 0 from select()
REPORT_TIMEOUT = 2.0  # seconds for rank 0 to name the missing ranks after another rank has timed out: many slices

Respond = Callable[[list[Facts]], tuple[Facts, int]]
Use = Callable[["Rendezvous"], object]


@dataclass(slots=True)
class Rendezvous:
    """The result of `rendezvous` on one rank. It owns its descriptors; `close`, or the end of `with`, closes them."""

    reply: Facts
    pids: list[int]
    pidfds: list[int]  # -1 for ranks of this process, and where the kernel has no pidfds
    fd: int

    def close(self) -> None:
        close_descriptors([self.fd, *self.pidfds])
        self.fd, self.pidfds = -1, [-1] * len(self.pidfds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rendezvous(
    store: Store, rank: int, size: int, hello: Facts, respond: Respond, use: Use, timeout: float
) -> Rendezvous:
    """Send this rank's hello to rank 0 and return its reply with the descriptors of the memory and the processes.

    Rank 0 calls `respond` with all hellos in rank order; it returns the reply and the descriptor of the memory, which
    the rendezvous then owns. Every rank calls `use` with the result, rank 0 before all others, and no rank returns
    before all have done so. Every rank raises the same error: CollectiveTimeout naming the ranks that did not arrive
    within `timeout` seconds, PeerLost naming a rank that died, or the error of `respond` or `use`. They are named by
    their ranks in the job. No descriptor is left open.
    """
    if size == 1:
        reply, fd = respond([hello])
        with ExitStack() as failed:
            result = failed.enter_context(Rendezvous(reply, [os.getpid()], [-1], fd))
            use(result)
            failed.pop_all()
        return result
    make = _RendezvousClient if rank else partial(_RendezvousServer, respond=respond)
    # The reason is stored before the connections close.
    with closing(make(store, rank, size, timeout, use)) as side, shared_failure(store, rank):
        descriptors.provide(rank, size, store.members)
        return side.run(hello)


class _Side:
    """What both sides have. Ranks are those of the rendezvous; errors name them by `_in_job`."""

    def __init__(self, store: Store, size: int, timeout: float, use: Use) -> None:
        self._store, self._size, self._timeout, self._use = store, size, timeout, use
        self._deadline = time.monotonic() + timeout

    def _in_job(self, rank: int) -> int:
        return rank_in_job(self._store.members, rank)

    def _absent(self, ranks: Collection[int], timeout: float) -> CollectiveTimeout:
        return arrival_timeout(ranks, self._size, timeout, members=self._store.members)


class _RendezvousServer(_Side):
    """Rank 0's side. An untrusted peer may connect and send nothing, or garbage: it delays no rank."""

    def __init__(self, store: Store, _: int, size: int, timeout: float, use: Use, respond: Respond) -> None:
        super().__init__(store, size, timeout, use)
        self._respond = respond
        self._secret = secrets.token_hex(16)
        self._name = f"ringcomm-rendezvous-{secrets.token_hex(16)}"
        gate = UnixGate(f"\0{self._name}", "this rendezvous")
        self._peers = PeerServer(gate, self._receive, self._in_job(0), timeout)
        self._ranks: dict[socket.socket, int] = {}
        self._hellos: list[Facts] = [{}] * size
        self._pids = [os.getpid()] + [0] * (size - 1)
        self._pidfds = [-1] * size
        self._ready: set[int] = set()
        self._owned: list[int] = []  # descriptors to close at the end

    def close(self) -> None:
        close_descriptors(self._owned)
        self._peers.close()

    def run(self, hello: Facts) -> Rendezvous:
        self._store.set(KEY, f"{self._name} {self._secret}".encode())
        self._serve_until(lambda: len(self._ranks) == self._size - 1)
        self._hellos[0], self._pidfds[0] = hello, open_pidfd(os.getpid(), self._in_job(0))
        self._owned.append(self._pidfds[0])
        reply, fd = self._respond(self._hellos)
        self._owned.append(fd)
        others = self._other_processes(0)
        pidfds = [pidfd if rank in others else -1 for rank, pidfd in enumerate(self._pidfds)]
        result = Rendezvous(reply, self._pids, pidfds, fd)
        self._use(result)
        for peer, rank in self._ranks.items():
            self._send_reply(peer, rank, reply, fd)
        self._serve_until(lambda: len(self._ready) == self._size - 1)
        for peer in self._ranks:
            with suppress(BrokenPipeError, ConnectionResetError):  # it died; the transport will notice
                send_packet(peer, {"go": True})
        self._owned[:] = set(self._owned) - {fd, *pidfds}
        return result

    def _serve_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._store.check()
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._timeout_error(self._timeout)
            self._peers.serve(min(left, SLICE))

    def _timeout_error(self, timeout: float) -> CollectiveTimeout:
        absent = set(range(1, self._size)) - set(self._ranks.values())
        return self._absent(absent or set(range(1, self._size)) - self._ready, timeout)

    def _peer_lost(self, rank: int) -> PeerLost:
        self._store.check()
        number = self._in_job(rank)
        return PeerLost(f"rank {number} (process {self._pids[rank]}) exited during startup", rank=number)

    def _receive(self, peer: socket.socket) -> None:
        rank = self._ranks.get(peer)
        packet = receive_packet(peer)
        if rank is None:
            secret, _, data = packet.data.partition(b"\0")
            if hmac.compare_digest(secret, self._secret.encode()):
                self._join(peer, packet._replace(data=data).read(self._in_job(0)), packet.fds)
            else:
                close_descriptors(packet.fds)
                left = "it disconnected without sending anything"
                self._peers.refuse(peer, "it sent a wrong secret" if packet.data else left)
        elif not packet.data:
            raise self._peer_lost(rank)
        elif "timeout" in (message := packet.read(self._in_job(0))):
            raise self._timeout_error(message["timeout"])
        else:
            self._ready.add(rank)

    def _join(self, peer: socket.socket, message: Facts, fds: list[int]) -> None:
        self._owned += fds
        rank, (pid, _) = message["rank"], credentials(peer)
        if rank in (0, *self._ranks.values()):
            number = self._in_job(rank)
            raise ArgumentError(f"processes {self._pids[rank]} and {pid} both joined as rank {number}", rank=number)
        self._ranks[peer], self._hellos[rank], self._pids[rank] = rank, message["hello"], pid
        self._pidfds[rank] = fds[0] if fds else -1

    def _send_reply(self, peer: socket.socket, rank: int, reply: Facts, fd: int) -> None:
        owners = [other for other in self._other_processes(rank) if self._pidfds[other] >= 0]
        fds = [fd, *(self._pidfds[other] for other in owners)]
        try:
            send_packet(peer, {"reply": reply, "pids": self._pids, "owners": owners}, fds[:MAX_DESCRIPTORS])
            for start in range(MAX_DESCRIPTORS, len(fds), MAX_DESCRIPTORS):
                send_packet(peer, {"more": True}, fds[start : start + MAX_DESCRIPTORS])
        except (BrokenPipeError, ConnectionResetError):
            raise self._peer_lost(rank) from None

    def _other_processes(self, rank: int) -> list[int]:
        """Return the ranks in other processes than `rank`, which can die alone. Pid 0: another pid namespace."""
        own = self._pids[rank]
        return [other for other, pid in enumerate(self._pids) if other != rank and (pid != own or pid == 0)]


class _RendezvousClient(_Side):
    """The side of every other rank."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, use: Use) -> None:
        super().__init__(store, size, timeout, use)
        self._rank = rank
        self._server = packet_socket()

    def close(self) -> None:
        self._server.close()

    def run(self, hello: Facts) -> Rendezvous:
        name, secret = self._find_server()
        self._server.settimeout(self._timeout)
        try:
            self._server.connect(b"\0" + name)
        except ConnectionRefusedError:
            raise self._server_lost() from None
        if reason := untrusted_reason(self._server):
            raise RingcommError(f"refused the rendezvous: {reason}")
        pidfd = open_pidfd(os.getpid(), self._in_job(self._rank))
        try:
            self._send({"rank": self._rank, "hello": hello}, [pidfd] if pidfd >= 0 else [], secret + b"\0")
        finally:
            close_descriptors([pidfd])
        with ExitStack() as failed:
            fds: list[int] = []
            failed.callback(close_descriptors, fds)
            message, batch = self._receive()
            fds += batch
            while len(fds) < 1 + len(message["owners"]):
                fds += self._receive()[1]
            pidfds = [-1] * self._size
            for owner, fd in zip(message["owners"], fds[1:], strict=True):
                pidfds[owner] = fd
            result = Rendezvous(message["reply"], message["pids"], pidfds, fds[0])
            self._use(result)
            self._send({"ready": True})
            self._receive()  # "go"
            failed.pop_all()
        return result

    def _find_server(self) -> list[bytes]:
        try:
            return self._store.get(KEY, self._timeout).split()
        except CollectiveTimeout as error:
            if error.rank is None:  # the store has all ranks, or does not know them
                raise self._absent([0], self._timeout) from None
            raise

    def _send(self, message: Facts, fds: Sequence[int] = (), prefix: bytes = b"") -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has gone; the next _receive raises the reason
            send_packet(self._server, message, fds, prefix)

    def _receive(self) -> tuple[Facts, list[int]]:
        self._server.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            packet = receive_packet(self._server)
        except TimeoutError:
            self._send({"timeout": self._timeout})
            self._server.settimeout(REPORT_TIMEOUT)
            try:
                packet = receive_packet(self._server)
            except TimeoutError:
                raise self._absent([0], self._timeout) from None
        if not packet.data:
            raise self._server_lost()
        return packet.read(self._in_job(self._rank)), packet.fds

    def _server_lost(self) -> PeerLost:
        self._store.check()
        number = self._in_job(0)
        return PeerLost(f"rank {number} exited during startup", rank=number)
