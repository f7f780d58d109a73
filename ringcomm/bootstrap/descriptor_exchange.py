"""The ranks of one host get descriptors from rank 0: of the memory that they share, and of all their processes.

The store cannot pass descriptors: it may be on another host. Through it the ranks exchange their hellos, and rank 0
names a socket, and a secret, for the descriptors:

    each rank → rank 0    the secret, its rank and its own pidfd           rank 0 waits for all
    rank 0 → each rank    the reply, all process ids, the memory, the pidfds of the other processes

Through the store they then tell each other that they have mapped the memory. A failure before that aborts the store,
and so fails on every rank with the same error: a rank that loses its connection to rank 0 reads the reason there.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ringcomm.bootstrap.processes import open_pidfd
from ringcomm.bootstrap.session import FIRST
from ringcomm.bootstrap.start_errors import lost_in_start, missing_ranks, rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts, shared_failure
from ringcomm.bootstrap.wire.framing import HELLO_BYTES, MESSAGE_BYTES, Frame, decode, encode
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.unix import (
    MAX_DESCRIPTORS,
    DescriptorSocket,
    UnixGate,
    close_descriptors,
    connect,
    credentials,
)
from ringcomm.errors import ArgumentError, PeerLost
from ringcomm.machine import descriptors

__all__ = ["REPORT_TIMEOUT", "Exchanged", "exchange_descriptors"]

HELLO, READY = "hello", "ready"  # in the store
SLICE = 0.1  # seconds between checks of the store: an abort there does not wake rank 0 from select()
BACKLOG_PAUSE = 0.01  # seconds before another attempt to connect
REPORT_TIMEOUT = 2.0  # seconds for rank 0 to name the missing ranks, after which the others give up too: many slices

Facts = dict[str, Any]
Respond = Callable[[list[Facts]], tuple[Facts, int]]
Use = Callable[["Exchanged"], object]


@dataclass(slots=True)
class Exchanged:
    """What a rank gets. It owns the descriptors; `close`, or the end of `with`, closes them."""

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


def exchange_descriptors(
    store: Store, rank: int, size: int, hello: Facts, respond: Respond, use: Use, timeout: float
) -> Exchanged:
    """Send this rank's hello to rank 0 and return its reply with the descriptors of the memory and the processes.

    Rank 0 calls `respond` with all hellos in rank order; it returns the reply and the descriptor of the memory, which
    the result then owns. Every rank calls `use` with the result, rank 0 before all others, and no rank returns
    before all have done so. Every rank raises the same error: CollectiveTimeout naming the ranks that did not arrive
    within `timeout` seconds, PeerLost naming a rank that died, or the error of `respond` or `use`. They are named by
    their ranks in the job. No descriptor is left open.
    """
    if size == 1:
        reply, fd = respond([hello])
        with ExitStack() as failed:
            result = failed.enter_context(Exchanged(reply, [os.getpid()], [-1], fd))
            use(result)
            failed.pop_all()
        return result
    make = partial(_Client, rank=rank) if rank else partial(_Server, respond=respond)
    # The reason is stored before the connections close.
    with closing(make(store, size, timeout, use)) as side, shared_failure(store, rank):
        descriptors.provide(rank, size, store.members)
        return side.run(hello)


class _Server:
    """Rank 0's side. An untrusted peer may connect and send nothing, or garbage: it delays no rank."""

    def __init__(self, store: Store, size: int, timeout: float, use: Use, respond: Respond) -> None:
        self._store, self._size, self._timeout, self._use, self._respond = store, size, timeout, use, respond
        self._deadline = time.monotonic() + timeout
        self._secret = os.urandom(16).hex()
        self._address = f"\0ringcomm-descriptors-{os.urandom(16).hex()}"
        gate = UnixGate(self._address, "the descriptors of a start", DescriptorSocket)
        self._peers = PeerServer(gate, self._receive, self._in_job(0))
        self._ranks: dict[DescriptorSocket, int] = {}
        self._pids = [os.getpid()] + [0] * (size - 1)
        self._pidfds = [-1] * size
        self._owned: list[int] = []  # descriptors to close at the end

    def close(self) -> None:
        close_descriptors(self._owned)
        self._peers.close()

    def run(self, hello: Facts) -> Exchanged:
        mine = {"hello": hello, "address": self._address, "secret": self._secret}
        ranks = all_gather_facts(self._store, HELLO, 0, self._size, mine, self._timeout)
        self._deadline = max(self._deadline, time.monotonic() + REPORT_TIMEOUT)  # all are there, perhaps just in time
        self._await_all()
        self._pidfds[0] = open_pidfd(os.getpid(), self._in_job(0))
        self._owned.append(self._pidfds[0])
        reply, fd = self._respond([each["hello"] for each in ranks])
        self._owned.append(fd)
        others = self._other_processes(0)
        pidfds = [pidfd if rank in others else -1 for rank, pidfd in enumerate(self._pidfds)]
        result = Exchanged(reply, self._pids, pidfds, fd)
        self._use(result)
        for peer, rank in self._ranks.items():
            self._send_reply(peer, rank, reply, fd)
        all_gather_facts(self._store, READY, 0, self._size, None, self._timeout, reads=FIRST)
        self._owned[:] = set(self._owned) - {fd, *pidfds}
        return result

    def _in_job(self, rank: int) -> int:
        return rank_in_job(self._store.members, rank)

    def _await_all(self) -> None:
        """Serve until all other ranks have joined."""
        while missing := set(range(1, self._size)).difference(self._ranks.values()):
            self._store.check()
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise missing_ranks(missing, self._size, self._timeout, members=self._store.members)
            self._peers.serve(min(left, SLICE))

    def _lost(self, rank: int) -> PeerLost:
        self._store.check(ask=True)
        return lost_in_start(self._in_job(rank), f"process {self._pids[rank]}")

    def _receive(self, peer: DescriptorSocket) -> None:
        try:
            message = peer.recv(HELLO_BYTES)
        except BlockingIOError:  # half a message
            return
        except OSError:
            message = b""
        if peer in self._ranks:  # which has no more to say
            raise self._lost(self._ranks[peer])
        import hmac  # and with it hashlib and OpenSSL, which no other rank needs

        secret, _, number = message.partition(b" ")
        if not hmac.compare_digest(secret, self._secret.encode()):
            left = "it disconnected without sending anything"
            self._peers.refuse(peer, "it sent a wrong secret" if message else left)
            return
        if peer.dropped:
            raise descriptors.exhausted(self._in_job(0), "to receive those of the other ranks")
        self._join(peer, int(number), peer.take_fds())

    def _join(self, peer: DescriptorSocket, rank: int, fds: list[int]) -> None:
        self._owned += fds
        pid, _ = credentials(peer)
        if rank in self._ranks.values():
            number = self._in_job(rank)
            raise ArgumentError(f"processes {self._pids[rank]} and {pid} both joined as rank {number}", rank=number)
        self._ranks[peer], self._pids[rank] = rank, pid
        self._pidfds[rank] = fds[0] if fds else -1

    def _send_reply(self, peer: DescriptorSocket, rank: int, reply: Facts, fd: int) -> None:
        owners = [other for other in self._other_processes(rank) if self._pidfds[other] >= 0]
        fds = [fd, *(self._pidfds[other] for other in owners)]
        peer.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            for begin in range(0, len(fds), MAX_DESCRIPTORS):
                message = encode("reply", reply=reply, pids=self._pids, owners=owners) if begin == 0 else encode("more")
                peer.send_fds(message, fds[begin : begin + MAX_DESCRIPTORS])
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost(rank) from None

    def _other_processes(self, rank: int) -> list[int]:
        """Return the ranks in other processes than `rank`, which can die alone. Pid 0: another pid namespace."""
        own = self._pids[rank]
        return [other for other, pid in enumerate(self._pids) if other != rank and (pid != own or pid == 0)]


class _Client:
    """The side of every other rank."""

    def __init__(self, store: Store, size: int, timeout: float, use: Use, rank: int) -> None:
        self._store, self._size, self._timeout, self._use, self._rank = store, size, timeout, use, rank
        self._deadline = time.monotonic() + timeout + REPORT_TIMEOUT
        self._held = ExitStack()

    def close(self) -> None:
        self._held.close()

    def run(self, hello: Facts) -> Exchanged:
        me, fact = (self._rank, self._size), {"hello": hello}
        ranks = all_gather_facts(self._store, HELLO, *me, fact, self._timeout, reads=FIRST)
        self._deadline = max(self._deadline, time.monotonic() + 2 * REPORT_TIMEOUT)
        self._connect(ranks[0]["address"], ranks[0]["secret"])
        answer = self._receive()
        fields = answer.fields
        with ExitStack() as failed:
            fds = self._server.take_fds()
            failed.callback(close_descriptors, fds)
            while len(fds) < 1 + len(fields["owners"]):
                self._receive()
                fds += self._server.take_fds()
            pidfds = [-1] * self._size
            for owner, fd in zip(fields["owners"], fds[1:], strict=True):
                pidfds[owner] = fd
            result = Exchanged(fields["reply"], fields["pids"], pidfds, fds[0])
            self._use(result)
            all_gather_facts(self._store, READY, *me, None, self._timeout, reads=FIRST)
            failed.pop_all()
        return result

    def _in_job(self, rank: int) -> int:
        return rank_in_job(self._store.members, rank)

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _connect(self, address: str, secret: str) -> None:
        server = None
        while server is None:
            try:
                server = connect(address, self._left(), DescriptorSocket)
            except BlockingIOError:  # other ranks wait to be admitted
                if time.monotonic() > self._deadline:
                    raise missing_ranks([0], self._size, self._timeout, members=self._store.members) from None
                time.sleep(BACKLOG_PAUSE)
            except ConnectionRefusedError:
                raise self._server_lost() from None
        self._server = self._held.enter_context(server)
        pidfd = open_pidfd(os.getpid(), self._in_job(self._rank))
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 is lost; _receive raises the reason
                self._server.send_fds(f"{secret} {self._rank}".encode(), [pidfd] if pidfd >= 0 else [])
        finally:
            close_descriptors([pidfd])

    def _receive(self) -> Frame:
        self._server.settimeout(self._left())
        try:
            data = self._server.recv(MESSAGE_BYTES)
        except TimeoutError:
            self._store.check(ask=True)
            raise missing_ranks([0], self._size, self._timeout, members=self._store.members) from None
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._server_lost()
        if self._server.dropped:
            raise descriptors.exhausted(self._in_job(self._rank), "to receive those of the other ranks")
        return decode(data)

    def _server_lost(self) -> PeerLost:
        self._store.check(ask=True)
        return lost_in_start(self._in_job(0))
