"""The thread that serves the sessions of a job: in its launcher, or in rank 0 where another launcher has started it."""

import hmac
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from ringcomm.bootstrap.member_store import MemberStore
from ringcomm.bootstrap.place import UNIX, Place
from ringcomm.bootstrap.session import CONNECTED, MEMBERS, SHRINK, BaseSession, Refused, Replies, Start
from ringcomm.bootstrap.shrink import Shrink, left_out_key
from ringcomm.bootstrap.wire.framing import (
    ENDED,
    HELLO_BYTES,
    MESSAGE_BYTES,
    Frame,
    MessageSocket,
    broken,
    decode,
    encode,
)
from ringcomm.bootstrap.wire.peers import Gate, PeerServer
from ringcomm.bootstrap.wire.unix import UnixGate, public_address
from ringcomm.errors import RingcommError
from ringcomm.machine.threads import starting

__all__ = ["Server", "serve_one_host", "serving"]

# Seconds for which rank 0 serves the other ranks after it has left. They normally leave within milliseconds; `ringcomm
# run` lets ranks live for the same time after one has failed.
LINGER = 5.0
HANDOVER = 0.2  # the same after a failure: stopped ranks hear of it from a thread in the background
MAX_WAIT = 3600.0  # seconds; a selector counts milliseconds in 32 bits
FAILED_STARTS = 100  # the last ones whose failure is kept for ranks that come late
MALFORMED = "malformed request"


@contextmanager
def serving(server: "Server", late: float) -> Iterator[None]:
    """Close the server at the end. After an exception it tells the failure to ranks that come within `late` seconds."""
    patience = 0.0  # an interrupted start ends at once
    try:
        yield
    except Exception:
        patience = late
        raise
    finally:
        server.close(patience)


@contextmanager
def serve_one_host(place: Place) -> Iterator[Place]:
    """Serve the sessions of a job whose ranks are all on this host; yield the place with the address."""
    name = secrets.token_hex(16)
    with serving(Server(UnixGate(public_address(name), "the store of this job"), None, place.secret), 0.0):
        yield replace(place, store=f"{UNIX}{name}")


class Server(threading.Thread):
    """Serves at a gate until `close`. Any process may connect: one that is no member of the job is refused and logged.

    Args:
        gate: where it listens
        rank: this process in the job; None: a launcher
        secret: what a member must know, unless the gate has made sure of that
        main: the name of a session, and the session, which `close` waits for
        membership: the session of the members of the job, if `main` has to know of it
        linger: seconds for which it waits, if LINGER is less, unless that session has failed
        earlier: starts that have failed elsewhere, of which it tells late ranks
    """

    def __init__(
        self,
        gate: Gate,
        rank: int | None,
        secret: str | None = None,
        main: tuple[str, Start] | None = None,
        membership: MemberStore | None = None,
        linger: float = 0.0,
        earlier: Mapping[str, Start] = MappingProxyType({}),
    ) -> None:
        super().__init__(name="ringcomm store", daemon=True)
        self._secret = None if secret is None else os.fsencode(secret)
        self.membership = membership or MemberStore()
        self._shrink = Shrink(self._end_start)
        self._rank, self._main = rank, main[1] if main else None
        self._starts: dict[str, Start] = {**earlier, **dict([main] if main else [])}
        self._joined: dict[MessageSocket, BaseSession] = {}
        self._linger, self._late = linger, 0.0
        self._peers = PeerServer(gate, self._receive, rank)
        self._woken, self._waker = socket.socketpair()
        self._peers.call_on(self._woken, self._note_closed)
        self._closed_at = math.inf
        with starting(f"the thread {self.name!r}"):
            self.start()

    def close(self, late: float = 0.0) -> None:
        """End once the members of the main session have left too, or after the time that it lingers.

        After a failure it goes on for `late` seconds to tell ranks that come late. The caller does not wait for that,
        but the process does, when it exits.
        """
        self._late = late
        with suppress(OSError):  # the thread has ended
            self._waker.send(b"\0")
        self.join(HANDOVER if late else None)
        if self.is_alive():
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self.join, daemon=False).start()

    @property
    def failed(self) -> dict[str, Start]:
        """The starts that have failed, once the server has ended."""
        return {name: start for name, start in self._starts.items() if start.failure}

    def run(self) -> None:
        try:
            while (left := self._end_at() - time.monotonic()) > 0:
                self._serve(min(left, max(0.0, self._shrink.due() - time.monotonic()), MAX_WAIT))
            while self._serve(0):  # ranks that have connected meanwhile get the failure too
                pass
        finally:  # so that clients hear of it at once, also if this thread fails
            self._peers.close()
            self._woken.close()
            self._waker.close()

    def _note_closed(self) -> None:
        self._woken.recv(1)
        self._closed_at = time.monotonic()

    def _end_at(self) -> float:
        main, seconds = self._main, 0.0
        if main and main.present and (main.complete or main.failure):
            seconds = LINGER if main.failure else max(LINGER, self._linger)
        if main and main.failure and not main.complete:
            seconds = max(seconds, self._late)
        return self._closed_at + seconds

    def _serve(self, timeout: float) -> bool:
        """Handle what comes within `timeout` seconds; return whether anything came."""
        try:
            served = self._peers.serve(timeout)
        except RingcommError as error:  # no descriptor is left
            for start in self._starts.values():
                start.fail(error)
            served = True
        if self.membership.lost:
            self._end_starts_of_the_lost()
        self._send(self._shrink.poll())
        for start in self._starts.values():
            self._send(start.poll())
        self._sweep()
        return served

    def _send(self, replies: Replies) -> None:
        for peer, message in replies:
            assert isinstance(peer, MessageSocket)
            self._peers.send(peer, message)

    def _receive(self, peer: MessageSocket) -> None:
        session, how = self._joined.get(peer), ENDED
        try:
            message = peer.recv(MESSAGE_BYTES if session else HELLO_BYTES)
        except BlockingIOError:  # half a message
            return
        except OSError as error:
            message, how = b"", broken(error)
        if not message:
            self._joined.pop(peer, None)
            self._peers.drop(peer)
            if session:
                self._send(session.lose(peer, how))
            return
        try:
            request = decode(message)
            if session:
                self._send(session.take(peer, request))
                self._note_connected(session)
            else:
                self._join(peer, request)
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
            # Without a secret, any process of this user can join.
            if session:
                self._send(session.take(peer, Frame("leave", {}, b"")))
            self._refuse(peer, MALFORMED)

    def _join(self, peer: MessageSocket, hello: Frame) -> None:
        """Let a peer join a session, or refuse it; drop the one of another start than this rank serves.

        That one looks again: rank 0 serves its starts one after another, over TCP at one address.
        """
        if self._rank is not None and self._main and hello.fields["session"] not in self._starts:
            self._peers.drop(peer)
            return
        if self._secret is not None and not hmac.compare_digest(os.fsencode(str(hello.fields["secret"])), self._secret):
            self._refuse(peer, "wrong secret for this job")
            return
        session = self._session(hello)
        try:
            self._send(session.join(peer, hello))
        except Refused as refused:
            self._refuse(peer, str(refused))
            return
        if peer in session.present:
            self._joined[peer] = session
        else:  # it has got the failure
            self._peers.drop(peer)

    def _session(self, hello: Frame) -> BaseSession:
        name, size, in_job = str(hello.fields["session"]), int(hello.fields["size"]), hello.fields["members"]
        if name == MEMBERS:
            return self.membership
        if name == SHRINK:
            return self._shrink
        members = range(size) if in_job == "all" else [*map(int, in_job)]
        if len(members) not in (0, size):
            raise ValueError(in_job)
        return self._starts.setdefault(name, Start(size, members))

    def _refuse(self, peer: MessageSocket, reason: str) -> None:
        self._joined.pop(peer, None)
        self._peers.send(peer, encode("refused", reason=reason))
        self._peers.refuse(peer, reason)

    def _note_connected(self, session: BaseSession) -> None:
        """At once: a member may be lost in the next message, and its group would agree again on who survives."""
        for name, start in self._starts.items():
            if start is session and start.has(CONNECTED):
                self.membership.connected = True
                for rank in self._shrink.end(name):
                    self._send(self.membership.set(left_out_key(rank), b""))

    def _end_start(self, name: str, size: int, error: RingcommError) -> None:
        self._starts.setdefault(name, Start(size)).fail(error)

    def _end_starts_of_the_lost(self) -> None:
        """Fail each start for which a rank was lost before it joined."""
        for start in self._starts.values():
            for rank in sorted(self.membership.lost.keys() & start.absent()):
                start.fail(self.membership.lost[rank])

    def _sweep(self) -> None:
        over = [name for name, start in self._starts.items() if start.over and start is not self._main]
        failed = [name for name in over if not self._starts[name].complete]
        failed.sort(key=lambda name: self._starts[name].failed_at)
        for name in {*over} - {*failed[-FAILED_STARTS:]}:
            del self._starts[name]
