"""A member of a session: one connection to the server, through which it shares the store of a start or of a job."""

import errno
import itertools
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self

from ringcomm.bootstrap.endpoint import Endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.wire.framing import (
    ENDED,
    MESSAGE_BYTES,
    Frame,
    MessageSocket,
    broken,
    close_in_children,
    decode,
    encode,
    failure_of,
    hang_up,
)
from ringcomm.bootstrap.wire.keepalive import probe_now
from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost, RingcommError, encode_error

__all__ = ["ANSWER_TIMEOUT", "SLICE", "Client", "Meanwhile", "hello_of"]

ANSWER_TIMEOUT = 5.0  # seconds for an answer, after the time of the question
SLICE = 0.02  # seconds between two calls of `meanwhile`
SHORTEST_PAUSE = 0.001  # seconds between two attempts to connect, doubled each time

Meanwhile = Callable[[], object] | None  # what is called again and again during a wait, and may raise what ends it


class Client:
    """A member of a session. The constructor returns when it has joined.

    It raises `endpoint.silent` if no server answers within `timeout` seconds, the failure of the session,
    and ArgumentError if the server refuses this process: for a rank that is taken, another size, or a wrong secret.

    Args:
        endpoint: of the server of the session
        session: its name
        place: the place of this member in it
        timeout: seconds to join it
        process: what this process is called, where its loss is reported
        watch: is called with each change of a key (of the session of the members)
        patience: seconds for an answer, after the time of the question
        late: is called, once, with what the constructor would raise, if no server has answered after `late_after`
            seconds of its `timeout`
    """

    def __init__(
        self,
        endpoint: Endpoint,
        session: str,
        place: Place,
        timeout: float,
        *,
        process: str = "",
        watch: Callable[[Frame], object] | None = None,
        patience: float = ANSWER_TIMEOUT,
        late: Callable[[CollectiveTimeout], object] | None = None,
        late_after: float = math.inf,
    ) -> None:
        self._endpoint, self._place = endpoint, place
        self.members = place.members
        self._watch, self._patience = watch, patience
        self._numbers = itertools.count()
        self._failure: Frame | None = None  # of the session, as the server has told it
        hello = hello_of(endpoint, session, place, process, watch is not None)
        self._socket = self._join(hello, timeout, late, late_after)
        close_in_children(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> Place | None:
        """See Store."""
        return self._place if self._place.store else None

    @property
    def server(self) -> str:
        return self._endpoint.address

    def fileno(self) -> int:
        return self._socket.fileno()

    def probe(self) -> float:
        """See keepalive.probe_now."""
        return probe_now(self._socket)

    def set(self, key: str, value: bytes) -> None:
        self.tell("set", value, key=key)

    def find(self, key: str, timeout: float = 0.0, meanwhile: Meanwhile = None) -> bytes | None:
        """Return the value of a key; None if it is not set within `timeout` seconds."""
        if timeout > 0 and (answer := self._await(self.put("get", key=key, wait=True), timeout, meanwhile)):
            return answer.payload
        answer = self.ask("get", key=key, wait=False)
        return answer.payload if answer.kind == "value" else None

    def all_gather(self, given: Contribution, timeout: float, meanwhile: Meanwhile = None) -> bytes | list[int]:
        """See Store."""
        what = {"key": given.name, "size": given.size, "reads": given.reads}
        number = self.put("all_gather", given.fact, rank=given.rank, **what)
        answer = self._await(number, timeout, meanwhile) or self.ask("missing", **what)
        return answer.payload if answer.kind == "value" else list(answer.fields["ranks"])

    def keys(self, begin: str) -> list[str]:
        """Return the keys that begin so (of the session of the members)."""
        found: list[str] = self.ask("keys", begin=begin).fields["keys"]
        return found

    def abort(self, error: RingcommError) -> None:
        with suppress(PeerLost):
            self.tell("abort", encode_error(error).encode())

    def check(self, ask: bool = False) -> None:
        """See Store."""
        if ask:
            self.find("")
        self.receive(None, 0.0)
        if self._failure:  # it came while this rank waited for something else
            raise failure_of(self._failure)

    def close(self) -> None:
        """Leave the session."""
        with suppress(PeerLost):
            self.tell("leave")
        hang_up(self._socket)

    def tell(self, kind: str, payload: bytes = b"", /, **fields: object) -> None:
        """Send a message that has no answer."""
        try:
            self._socket.settimeout(ANSWER_TIMEOUT)  # not that of the last receive
            self._socket.send(encode(kind, payload, **fields))
        except OSError as error:
            raise self._endpoint.lost(broken(error)) from None

    def ask(self, kind: str, seconds: float = 0.0, meanwhile: Meanwhile = None, /, **fields: object) -> Frame:
        """Return the answer to a question that the server answers within `seconds`, or raise its failure."""
        limit = seconds + self._patience
        if answer := self._await(self.put(kind, **fields), limit, meanwhile):
            return answer
        raise self._endpoint.silent(limit)

    def put(self, kind: str, payload: bytes = b"", /, **fields: object) -> int:
        """Send a question; return its number, for `receive`."""
        number = next(self._numbers)
        self.tell(kind, payload, id=number, **fields)
        return number

    def receive(self, number: int | None, seconds: float) -> Frame | None:
        """Return the answer to that question if it comes in time; pass on changes, and drop late answers to others.

        Raises the failure that it carries, and PeerLost if the server is lost.
        """
        end = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(0.0, end - time.monotonic()))
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except OSError as error:
                if isinstance(error, BlockingIOError | TimeoutError) and error.errno != errno.ETIMEDOUT:
                    return None  # nothing, or half a message
                raise self._endpoint.lost(broken(error)) from None
            if not data:
                raise self._endpoint.lost(ENDED)
            message = decode(data)
            if message.kind == "failure":
                self._failure = message
            if message.kind == "changed" and self._watch:
                self._watch(message)
            elif message.fields.pop("id", None) == number:
                break
        if message.kind == "failure":
            raise failure_of(message)
        return message

    def _await(self, number: int, seconds: float, meanwhile: Meanwhile) -> Frame | None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if answer := self.receive(number, min(left, SLICE) if meanwhile else left):
                return answer
            if meanwhile:
                meanwhile()
        return None

    def _join(
        self, hello: bytes, timeout: float, late: Callable[[CollectiveTimeout], object] | None, late_after: float
    ) -> MessageSocket:
        """Connect as soon as the server listens, and say who this is."""
        begin, pause = time.monotonic(), SHORTEST_PAUSE
        deadline = begin + timeout
        failure: OSError | None = None
        while True:
            # Refused, busy or disconnected: the server does not listen yet. No call waits for that, so poll.
            try:
                if joined := self._attempt(hello, max(SHORTEST_PAUSE, deadline - time.monotonic())):
                    return joined
                failure = ConnectionError("it closed the connection")
            except RingcommError:
                raise
            except TimeoutError as error:  # perhaps cut short by the deadline: an earlier attempt tells more
                failure = failure or error
            except (ConnectionError, BlockingIOError) as error:
                failure = error
                if self._endpoint.always_up and isinstance(error, ConnectionRefusedError):
                    raise self._endpoint.lost(ENDED) from None
            if (left := deadline - time.monotonic()) <= 0:
                raise self._endpoint.silent(timeout, failure)
            if late and time.monotonic() >= begin + late_after:
                late(self._endpoint.silent(late_after, failure))
                late = None
            time.sleep(min(pause, left))
            pause = min(2 * pause, self._endpoint.longest_pause)

    def _attempt(self, hello: bytes, seconds: float) -> MessageSocket | None:
        """Return a connection that has joined; None if the server has closed it."""
        end = time.monotonic() + seconds
        with ExitStack() as stack:
            peer = stack.enter_context(self._endpoint.connect(seconds))
            peer.settimeout(max(0.001, end - time.monotonic()))
            peer.send(hello)
            if not (data := peer.recv(MESSAGE_BYTES)):
                return None
            answer = decode(data)
            if answer.kind == "failure":
                raise failure_of(answer)
            if answer.kind == "refused":
                text = f"{self._endpoint.name} refused this process: {answer.fields['reason']}"
                raise ArgumentError(text, rank=self._place.rank)
            stack.pop_all()
            return peer


def hello_of(endpoint: Endpoint, session: str, place: Place, process: str = "", watch: bool = False) -> bytes:
    """Return the first message of a member; see Client."""
    here = "" if endpoint.secret is not None else f" on {os.uname().nodename}"
    process = process or f"process {os.getpid()}{here}"
    members = "all" if place.members == range(place.size) else place.members  # else bytes grow with the square
    who = {"rank": place.rank, "size": place.size, "members": members, "process": process}
    return encode("join", session=session, watch=watch, secret=endpoint.secret, **who)
