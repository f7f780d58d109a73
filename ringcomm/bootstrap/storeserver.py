"""The thread that serves a store: rank 0's for the ranks of one host."""

import hmac
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress

from ringcomm.bootstrap.arrivals import rank_in_job
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.servedstore import JOIN, ServedStore, reply
from ringcomm.bootstrap.server import PeerServer
from ringcomm.bootstrap.sockets import MESSAGE_BYTES, credentials
from ringcomm.errors import RingcommError
from ringcomm.machine.threads import starting

__all__ = ["LINGER", "StoreServer"]

# Seconds for which rank 0 serves the other ranks after it has left. They normally leave within milliseconds; `ringcomm
# run` lets ranks live for the same time after one has failed.
LINGER = 5.0
HANDOVER = 0.2  # the same after a failure: those that do not run hear of it from a thread in the background
MAX_WAIT = 3600.0  # seconds; a selector counts milliseconds in 32 bits


class StoreServer(threading.Thread):
    """Serves a SocketStore until every rank has joined and left, or rank 0 has left before every rank has joined.

    Any process may connect: the server refuses and logs one whose first message is not that of a rank of this job.
    """

    def __init__(self, place: Place, address: str, store: ServedStore | None = None, process: str = "") -> None:
        super().__init__(name="ringcomm store", daemon=True)
        self.late = 0.0  # seconds for which, after rank 0 has left, those that arrive are told about a failure
        self._place = place
        self._store = store or ServedStore(place.size, place.members)
        self._joined: dict[socket.socket, ServedStore] = {}
        self._left: float | None = None  # when rank 0 left
        self._peers = self._listen(address)
        self.client, self._own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._store.members[self._own], self._store.processes[0] = 0, process or f"process {os.getpid()}"
        self._joined[self._own] = self._store
        self._peers.add(self._own)
        with starting(f"the thread {self.name!r}"):
            self.start()

    def run(self) -> None:
        while not self._finished():
            self._serve(self._select_timeout())
        while self._serve(0):  # ranks that have connected meanwhile get the failure too
            pass
        if self._store.failure and self.late and not self._all_have_left:
            # The caller of `join` does not wait for them. The process does, when it exits: their thread is no daemon.
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self._report_failure, name="ringcomm late ranks", daemon=False).start()
                return
        self._peers.close()

    def _report_failure(self) -> None:
        """Tell the failure to the ranks that arrive late, and to those that have not asked yet."""
        start = time.monotonic()
        with closing(self._peers):
            while not self._all_have_left:
                limit = LINGER if self._store.complete else max(self.late, LINGER if self._store.members else 0.0)
                if (left := start + limit - time.monotonic()) <= 0:
                    break
                self._serve(left)

    @property
    def _all_have_left(self) -> bool:
        return self._store.complete and not self._store.members

    def _listen(self, address: str) -> PeerServer:
        number = rank_in_job(self._place.members, 0)
        return PeerServer(address, f"rank {number} of job {self._place.job!r}", self._receive, number)

    def _stores(self) -> Iterable[ServedStore]:
        return (self._store,)

    def _serve(self, timeout: float | None) -> bool:
        """Handle what comes within `timeout` seconds; return whether anything came."""
        try:
            served = self._peers.serve(timeout)
        except RingcommError as error:  # no descriptor is left
            self._store.fail(error)
            served = True
        for store in self._stores():
            store.answer_pending()
        if self._own not in self._store.members and self._left is None:
            self._left = time.monotonic()
        return served

    def _finished(self) -> bool:
        if self._left is None:
            return False
        incomplete = not (self._store.complete or self._store.failure)
        return incomplete or not self._store.members or time.monotonic() > self._deadline(self._left)

    def _deadline(self, left: float) -> float:
        """Return until when rank 0 waits for the others: it must not get a failure much later than they do."""
        return left + (HANDOVER if self._store.failure and self.late else LINGER)

    def _select_timeout(self) -> float | None:
        deadlines = [deadline for store in self._stores() for deadline in store.deadlines()]
        if self._left:
            deadlines.append(self._deadline(self._left))
        return min(max(0.0, min(deadlines) - time.monotonic()), MAX_WAIT) if deadlines else None

    def _receive(self, peer: socket.socket) -> None:
        store, broken = self._joined.get(peer), None
        try:
            message = peer.recv(MESSAGE_BYTES)
        except BlockingIOError:  # half a message
            return
        except OSError as error:
            message, broken = b"", error
        if not message:
            if store:
                store.lose(peer, broken)
            self._drop(peer)
        elif not store:
            if refusal := self._join(peer, message):
                reply(peer, "refused", refusal.encode())
                self._peers.refuse(peer, refusal)
        else:
            try:
                store.handle(peer, message)
            except ValueError:  # without a nonce, any process of this user can join
                store.leave(peer)
                del self._joined[peer]
                self._peers.refuse(peer, "malformed request")

    def _join(self, peer: socket.socket, message: bytes) -> str:
        """Let a peer join the store; return why it is refused, or an empty string."""
        nonce = os.fsencode(self._place.nonce)
        if len(message) < JOIN.size or not hmac.compare_digest(message[JOIN.size :], nonce):
            return "wrong nonce for this job"
        rank, size = JOIN.unpack_from(message)
        return self._take_in(peer, self._store, rank, size, f"process {credentials(peer)[0]}")

    def _take_in(self, peer: socket.socket, store: ServedStore, rank: int, size: int, process: str) -> str:
        refusal = store.join(peer, rank, size, process)
        if not refusal:
            if peer in store.members:
                self._joined[peer] = store
            else:  # it has got the failure
                self._peers.drop(peer)
        return refusal

    def _drop(self, peer: socket.socket) -> None:
        self._joined.pop(peer, None)
        self._peers.drop(peer)
