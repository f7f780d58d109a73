"""Where the ranks of one host meet before they share memory: hellos go to rank 0, file descriptors come back.

Rank 0 listens at a socket whose random name, with a secret, it tells through the store. Then, step by step:

    each rank → rank 0    the secret, its hello, a pidfd of itself      until all have arrived
    rank 0 → each rank    the welcome, all process ids, the memory, the pidfds of the other processes
    each rank → rank 0    that it has them                              until all have said so
    rank 0 → each rank    "go"

Whatever goes wrong on any rank before "go" aborts the store, and so ends the meeting for all, with the same reason: a
rank that loses its connection asks the store why.
"""

import array
import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost, RingcommError, refuse
from ringcomm.sockets import MESSAGE_BYTES, credentials, listen, packet_socket, stranger
from ringcomm.store import Store, late, shared_failure

__all__ = ["Meeting", "meet"]

log = logging.getLogger("ringcomm")

KEY = "meeting"
BATCH = 250  # descriptors in one message: the kernel takes 253
SLICE = 0.1  # seconds between two looks at the store, whose end does not wake rank 0 from waiting for connections
GRACE = 2.0  # seconds for rank 0 to find out who is missing, when another rank's time is up: many slices

Message = dict[str, Any]
Answer = Callable[[list[Message]], tuple[Message, int]]


@dataclass(slots=True)
class Meeting:
    """What every rank has after `meet`. The descriptors are its own; `close`, or the end of `with`, closes them."""

    welcome: Message
    pids: list[int]
    pidfds: list[int]  # -1 for the ranks of this process, and where the kernel has no pidfds
    fd: int

    def close(self) -> None:
        _close([self.fd, *self.pidfds])
        self.fd, self.pidfds = -1, [-1] * len(self.pidfds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def meet(store: Store, rank: int, size: int, hello: Message, answer: Answer, timeout: float) -> Meeting:
    """Exchange the hellos of all `size` ranks for a welcome and the descriptors of memory and processes.

    Rank 0 calls `answer` with the hellos in rank order. It returns the welcome and the descriptor of the memory, which
    belongs to the meeting from then on. On every rank this raises CollectiveTimeout naming the ranks that did not
    arrive within `timeout` seconds, PeerLost naming the one that died, or what `answer` raised; then no descriptor is
    left open.
    """
    if size == 1:
        welcome, fd = answer([hello])
        return Meeting(welcome, [os.getpid()], [-1], fd)
    # The reason of a failure is in the store before connections close.
    if rank == 0:
        with ExitStack() as stack, shared_failure(store, rank):
            return _Host(store, size, timeout, stack).meet(hello, answer)
    with packet_socket() as host, shared_failure(store, rank):
        return _Guest(store, host, rank, size, timeout).meet(hello)


class _Host:
    """Rank 0's side. It waits for ranks only: strangers may connect and be silent, or talk nonsense."""

    def __init__(self, store: Store, size: int, timeout: float, stack: ExitStack) -> None:
        self._store = store
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._secret = secrets.token_hex(16).encode()
        self._ranks: dict[socket.socket, int] = {}
        self._hellos: list[Message] = [{}] * size
        self._pids = [os.getpid()] + [0] * (size - 1)
        self._pidfds = [-1] * size
        self._ready: set[int] = set()
        self._held: list[int] = []  # descriptors to close at the end
        self._stack = stack  # closes every connection at the end, strangers' too
        self._selector = stack.enter_context(selectors.DefaultSelector())

    def meet(self, hello: Message, answer: Answer) -> Meeting:
        name = f"ringcomm-meet-{secrets.token_hex(16)}".encode()
        listener = self._stack.enter_context(listen(f"\0{name.decode()}", "this meeting"))
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._store.set(KEY, name + b" " + self._secret)
        with _closing(self._held):
            self._serve_until(lambda: len(self._ranks) == self._size - 1)
            self._hellos[0], self._pidfds[0] = hello, _own_pidfd()
            self._held.append(self._pidfds[0])
            welcome, fd = answer(self._hellos)
            self._held.append(fd)
            for peer, rank in self._ranks.items():
                self._hand_over(peer, rank, welcome, fd)
            self._serve_until(lambda: len(self._ready) == self._size - 1)
            for peer in self._ranks:
                with suppress(BrokenPipeError, ConnectionResetError):  # it has gone; whoever needs it will notice
                    _send(peer, {"go": True})
            others = self._others(0)
            pidfds = [pidfd if rank in others else -1 for rank, pidfd in enumerate(self._pidfds)]
            self._held[:] = set(self._held) - {fd, *pidfds}
            return Meeting(welcome, self._pids, pidfds, fd)

    def _serve_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._store.check()
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._late(self._timeout)
            for key, _ in self._selector.select(min(left, SLICE)):
                key.data()

    def _late(self, timeout: float) -> CollectiveTimeout:
        absent = set(range(1, self._size)) - set(self._ranks.values())
        return late(absent or set(range(1, self._size)) - self._ready, self._size, timeout)

    def _lost(self, rank: int) -> PeerLost:
        self._store.check()
        return PeerLost(f"rank {rank} (process {self._pids[rank]}) ended during the start", rank=rank)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # gone again
            peer, _ = listener.accept()
            peer.settimeout(self._timeout)
            self._stack.enter_context(peer)
            if reason := stranger(peer):
                log.warning("refused a connection: %s", reason)
                peer.close()
            else:
                self._selector.register(peer, selectors.EVENT_READ, partial(self._serve, peer))

    def _serve(self, peer: socket.socket) -> None:
        rank = self._ranks.get(peer)
        packet = _receive(peer)
        if rank is None:
            self._admit(peer, packet)
        elif not packet.data:
            raise self._lost(rank)
        elif "late" in (message := packet.read()):
            raise self._late(message["late"])
        else:
            self._ready.add(rank)

    def _admit(self, peer: socket.socket, packet: "_Packet") -> None:
        pid, _ = credentials(peer)
        secret, _, data = packet.data.partition(b"\0")
        if not hmac.compare_digest(secret, self._secret):
            reason = "it does not know the secret of this start" if packet.data else "it left without a word"
            log.warning("refused process %d: %s", pid, reason)
            _close(packet.fds)
            self._selector.unregister(peer)
            peer.close()
            return
        message = packet._replace(data=data).read()
        self._held += packet.fds
        rank = message["rank"]
        if rank in (0, *self._ranks.values()):
            raise ArgumentError(f"two came as rank {rank}: processes {self._pids[rank]} and {pid}", rank=rank)
        self._ranks[peer], self._hellos[rank], self._pids[rank] = rank, message["hello"], pid
        self._pidfds[rank] = packet.fds[0] if packet.fds else -1

    def _hand_over(self, peer: socket.socket, rank: int, welcome: Message, fd: int) -> None:
        """Give one rank all it needs to share memory with the others and to see them die."""
        owners = [other for other in self._others(rank) if self._pidfds[other] >= 0]
        fds = [fd, *(self._pidfds[other] for other in owners)]
        try:
            _send(peer, {"welcome": welcome, "pids": self._pids, "owners": owners}, fds[:BATCH])
            for start in range(BATCH, len(fds), BATCH):
                _send(peer, {"more": True}, fds[start : start + BATCH])
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost(rank) from None

    def _others(self, rank: int) -> list[int]:
        """Return the ranks in other processes than `rank`: those that can die without it."""
        own = self._pids[rank]
        return [other for other, pid in enumerate(self._pids) if other != rank and (pid != own or pid == 0)]


class _Guest:
    """Every other rank's side."""

    def __init__(self, store: Store, host: socket.socket, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._host = host
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def meet(self, hello: Message) -> Meeting:
        name, secret = self._store.get(KEY, self._timeout).split()
        self._host.settimeout(self._timeout)
        try:
            self._host.connect(b"\0" + name)
        except ConnectionRefusedError:
            raise self._lost() from None
        if reason := stranger(self._host):
            raise RingcommError(f"refused to meet: {reason}")
        pidfd = _own_pidfd()
        with _closing([pidfd]):
            self._say({"rank": self._rank, "hello": hello}, [pidfd] if pidfd >= 0 else [], secret + b"\0")
        return self._take()

    def _take(self) -> Meeting:
        fds: list[int] = []
        with _closing(fds):
            message, batch = self._hear()
            fds += batch
            while len(fds) < 1 + len(message["owners"]):
                fds += self._hear()[1]
            self._say({"ready": True})
            self._hear()  # "go"
            pidfds = [-1] * self._size
            for owner, fd in zip(message["owners"], fds[1:], strict=True):
                pidfds[owner] = fd
            meeting = Meeting(message["welcome"], message["pids"], pidfds, fds[0])
            fds.clear()
            return meeting

    def _say(self, message: Message, fds: Sequence[int] = (), prefix: bytes = b"") -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has gone, and the next _hear says why
            _send(self._host, message, fds, prefix)

    def _hear(self) -> tuple[Message, list[int]]:
        self._host.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            packet = _receive(self._host)
        except TimeoutError:
            self._say({"late": self._timeout})
            self._host.settimeout(GRACE)
            try:
                packet = _receive(self._host)
            except TimeoutError:
                raise late([0], self._size, self._timeout) from None
        if not packet.data:
            raise self._lost()
        return packet.read(), packet.fds

    def _lost(self) -> PeerLost:
        self._store.check()
        return PeerLost("rank 0 ended during the start", rank=0)


class _Packet(NamedTuple):
    """What came in one message; without data, the other side has gone."""

    data: bytes
    fds: list[int]
    whole: bool  # no descriptor was lost

    def read(self) -> Message:
        """Return the message of somebody who is known."""
        if not self.whole:
            _close(self.fds)
            import resource  # not everywhere

            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise RingcommError(f"this process needs more file descriptors than it may have (RLIMIT_NOFILE is {limit})")
        message: Message = json.loads(self.data)
        return message


def _send(peer: socket.socket, message: Message, fds: Sequence[int] = (), prefix: bytes = b"") -> None:
    data = prefix + json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise refuse("a message of the start", f"at most {MESSAGE_BYTES} bytes", len(data))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    deadline = time.monotonic() + (peer.gettimeout() or 0)
    while True:
        try:
            peer.sendmsg([data], rights)
            return
        except OSError as error:
            # A user may have only so many descriptors on their way at a time; they arrive as the others read.
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _receive(peer: socket.socket) -> _Packet:
    space = socket.CMSG_SPACE(BATCH * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # It left before it had read all we said. What it said before is still there.
        data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return _Packet(data, list(fds), whole=not flags & socket.MSG_CTRUNC)


def _own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return -1  # the kernel has none, or does not allow it


@contextmanager
def _closing(fds: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        _close(fds)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
