"""Where the ranks of one host meet before they share memory: hellos go to rank 0, file descriptors come back.

Rank 0 listens at a socket whose random name, with a secret, it tells through the store. Then, step by step:

    each rank → rank 0    its hello and a pidfd of itself         until all have arrived
    rank 0 → each rank    the welcome, all process ids, the memory, the pidfds of the other processes
    each rank → rank 0    that it has them                        until all have said so
    rank 0 → each rank    "go"

Whatever goes wrong on any rank before "go" ends the meeting for all of them, with the same reason.
"""

import array
import errno
import hmac
import json
import logging
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ringcomm import errors
from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost, RingcommError, refuse
from ringcomm.rendezvous import Store, late
from ringcomm.sockets import MESSAGE_BYTES, credentials, listen, packet_socket, stranger

__all__ = ["Meeting", "meet"]

log = logging.getLogger("ringcomm")

KEY = "meeting"
BATCH = 250  # descriptors in one message: the kernel takes 253
GRACE = 2.0  # seconds in which rank 0 tells a rank whose time is up who was missing

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
    if rank == 0:
        with ExitStack() as stack:
            return _Host(size, timeout, stack).meet(store, hello, answer)
    with packet_socket() as host:
        return _Guest(host, rank, size, timeout).meet(store, hello)


class _Host:
    """Rank 0's side. It waits for ranks only: strangers may connect and be silent."""

    def __init__(self, size: int, timeout: float, stack: ExitStack) -> None:
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._secret = secrets.token_hex(16)
        self._ranks: dict[socket.socket, int] = {}
        self._hellos: list[Message] = [{}] * size
        self._pids = [os.getpid()] + [0] * (size - 1)
        self._pidfds = [-1] * size
        self._ready: set[int] = set()
        self._held: list[int] = []  # descriptors to close at the end
        self._stack = stack  # closes every connection at the end, strangers' too
        self._selector = stack.enter_context(selectors.DefaultSelector())

    def meet(self, store: Store, hello: Message, answer: Answer) -> Meeting:
        name = f"ringcomm-meet-{secrets.token_hex(16)}"
        listener = self._stack.enter_context(listen(f"\0{name}", "this meeting"))
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        store.set(KEY, json.dumps({"name": name, "secret": self._secret}).encode())
        with _closing(self._held):
            try:
                self._serve_until(lambda: len(self._ranks) == self._size - 1)
                self._hellos[0], self._pidfds[0] = hello, _own_pidfd()
                self._held.append(self._pidfds[0])
                welcome, fd = answer(self._hellos)
                self._held.append(fd)
                for peer, rank in self._ranks.items():
                    self._hand_over(peer, rank, welcome, fd)
                self._serve_until(lambda: len(self._ready) == self._size - 1)
            except BaseException as error:
                self._tell({"error": _packed(error, 0)})
                raise
            self._tell({"go": True})
            others = self._others(0)
            pidfds = [pidfd if rank in others else -1 for rank, pidfd in enumerate(self._pidfds)]
            self._held[:] = set(self._held) - {fd, *pidfds}
            return Meeting(welcome, self._pids, pidfds, fd)

    def _serve_until(self, done: Callable[[], bool]) -> None:
        while not done():
            events = self._selector.select(max(0.0, self._deadline - time.monotonic()))
            for key, _ in events:
                key.data()
            if not events:
                raise self._late(self._timeout)

    def _late(self, timeout: float) -> CollectiveTimeout:
        absent = set(range(1, self._size)) - set(self._ranks.values())
        return late(absent or set(range(1, self._size)) - self._ready, self._size, timeout)

    def _lost(self, rank: int) -> PeerLost:
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
        message, fds = _receive(peer)
        if rank is None:
            self._admit(peer, message, fds)
        elif message is None:
            raise self._lost(rank)
        elif "error" in message:
            raise _unpacked(message["error"])
        elif "late" in message:
            raise self._late(message["late"])
        else:
            self._ready.add(rank)

    def _admit(self, peer: socket.socket, message: Message | None, fds: list[int]) -> None:
        pid, _ = credentials(peer)
        refusal = None
        if message is None:
            refusal = "it left without a word"
        elif not hmac.compare_digest(str(message.get("secret")).encode(), self._secret.encode()):
            refusal = "it does not know the secret of this start"
        elif message["rank"] in (0, *self._ranks.values()):
            refusal = f"rank {message['rank']} is already taken by process {self._pids[message['rank']]}"
            _send(peer, {"error": _packed(ArgumentError(refusal, rank=message["rank"]), 0)})
        if message is None or refusal:
            log.warning("refused process %d: %s", pid, refusal)
            _close(fds)
            self._selector.unregister(peer)
            peer.close()
            return
        rank = self._ranks[peer] = message["rank"]
        self._hellos[rank], self._pids[rank], self._pidfds[rank] = message["hello"], pid, fds[0] if fds else -1
        self._held += fds

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

    def _tell(self, message: Message) -> None:
        for peer in self._ranks:
            with suppress(OSError):  # it has gone; whoever needs it will notice
                _send(peer, message)


class _Guest:
    """Every other rank's side."""

    def __init__(self, host: socket.socket, rank: int, size: int, timeout: float) -> None:
        self._host = host
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def meet(self, store: Store, hello: Message) -> Meeting:
        where = json.loads(store.get(KEY, self._timeout))
        self._host.settimeout(self._timeout)
        try:
            self._host.connect(f"\0{where['name']}")
        except ConnectionRefusedError:
            raise self._lost() from None
        if reason := stranger(self._host):
            raise RingcommError(f"refused to meet: {reason}")
        pidfd = _own_pidfd()
        try:
            message = {"secret": where["secret"], "rank": self._rank, "hello": hello}
            self._say(message, [pidfd] if pidfd >= 0 else [])
            return self._take()
        except BaseException as error:
            self._say({"error": _packed(error, self._rank)})
            raise
        finally:
            _close([pidfd])

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

    def _say(self, message: Message, fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has gone; why it went can still be heard
            _send(self._host, message, fds)

    def _hear(self) -> tuple[Message, list[int]]:
        self._host.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            message, fds = _receive(self._host)
        except TimeoutError:
            self._say({"late": self._timeout})
            self._host.settimeout(GRACE)
            try:
                message, fds = _receive(self._host)
            except TimeoutError:
                raise late([0], self._size, self._timeout) from None
        if message is None:
            raise self._lost()
        if "error" in message:
            raise _unpacked(message["error"])
        return message, fds

    def _lost(self) -> PeerLost:
        return PeerLost("rank 0 ended during the start", rank=0)


def _send(peer: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
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


def _receive(peer: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message with its descriptors; {} for garbage, None when the other side has gone."""
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
    if flags & socket.MSG_CTRUNC:
        _close(fds)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise RingcommError(f"this process needs more file descriptors than it may have (RLIMIT_NOFILE is {limit})")
    try:
        message = json.loads(data) if data else None
    except ValueError:
        message = {}
    if message is not None and not isinstance(message, dict):
        message = {}
    return message, list(fds)


def _packed(error: BaseException, rank: int) -> Message:
    if isinstance(error, RingcommError):
        return {"kind": type(error).__name__, "text": str(error), "rank": error.rank}
    return {"kind": "Aborted", "text": f"rank {rank} ended the start: {error!r}", "rank": rank}


def _unpacked(packed: Message) -> RingcommError:
    kind: type[RingcommError] = getattr(errors, packed["kind"])
    return kind(packed["text"], rank=packed["rank"])


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
