"""One rank's end of a group that exchanges messages: membership, waiting, failure, reports and closing."""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from ringcomm.bootstrap.store import format_ranks
from ringcomm.errors import (
    Aborted,
    ArgumentError,
    CollectiveTimeout,
    PeerLost,
    RingcommError,
    decode_error,
    describe_ancestor,
    encode_error,
)
from ringcomm.machine.threads import start_thread
from ringcomm.transports.blocks import NOTHING, Bytes, Steps
from ringcomm.transports.messages.call_queue import CallQueue
from ringcomm.transports.messages.flight import FlightRecord
from ringcomm.transports.messages.matching import MatchingQueues
from ringcomm.transports.waits import Deadline

__all__ = ["NOT_CALLED", "Header", "Link", "Membership", "MessageGroup"]

DRAIN = 2.0  # seconds that a failed group waits until peers have taken its messages: a peer may never poll again
ANSWER = 1.0  # seconds that a report waits for the peers' answers
NOT_CALLED = "it was not called by {}"

Header = dict[str, Any]


class Link(Protocol):
    """Carries messages between ranks: whole or not at all, and in order between two ranks."""

    rank: int
    size: int
    threads: bool  # whether any thread may use it

    def send(self, peer: int, header: Header, payload: Bytes) -> None:
        """Queue a message and return at once. The link owns `payload` from then on."""

    def register(self, name: str, group: "MessageGroup") -> None:
        """Deliver the messages for a group, earlier ones included, to its `message_arrived` and `peer_lost`."""

    def poll(self) -> None:
        """Receive what has arrived, unless a thread of the link does that."""

    def busy(self) -> bool:
        """Return whether messages are in flight that need polling."""

    def pause(self, group: "MessageGroup", seen: int) -> None:
        """Wait until `group.changes` differs from `seen`, or for a short time."""

    def leave(self, name: str, staying: set[int], timeout: float) -> None:
        """Unregister a group, which the ranks `staying` have not left yet. Close the link after its last group.

        May wait up to `timeout` seconds until the peers have taken all messages.
        """


@dataclass(frozen=True)
class Membership:
    """A rank's membership in a group."""

    link: Link
    members: list[int]  # their ranks on the link
    group: str  # its name in message headers
    timeout: float


class MessageGroup:
    """One rank's end of a group."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._link, self._members, self._group = membership.link, membership.members, membership.group
        self.rank = self._members.index(self._link.rank)
        self.size = len(self._members)
        self.timeout = membership.timeout
        self.changed = threading.Condition(threading.RLock())  # guards all below
        self.changes = 0  # how often it was notified
        self._epochs = itertools.count(1)
        self._done = 0  # the epoch of the last finished call
        self._queue = CallQueue(self)
        self._matching = MatchingQueues()
        self._flight = FlightRecord()
        self._reports: dict[int, str] = {}
        self._lost: dict[int, PeerLost] = {}
        self._left_after: dict[int, int] = {}  # rank → the last epoch it finished
        self._failure: RingcommError | None = None
        self._closed = False
        self._children: WeakSet[MessageGroup] = WeakSet()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._link.register(self._group, self)

    # --- Called by the link, on its threads ---------------------------------------------------------------------------

    def message_arrived(self, link_rank: int, header: Header, payload: Bytes) -> None:
        source, kind = self._members.index(link_rank), header["kind"]
        with self.changed:
            if kind == "p2p":
                self._matching.deliver(source, header["tag"], header["count"], header["dtype"], payload)
            elif kind == "failure":
                self._fail(decode_error(header["error"]), notify_peers=False)
            elif kind == "closed":
                self._lose(source, f"rank {source} closed the communicator", header["epoch"])
            elif kind == "report request":
                self._send(source, {"kind": "report", "text": self._flight.last(header["calls"])})
            elif kind == "report":
                self._reports[source] = header["text"]
            self.notify()

    def peer_lost(self, link_rank: int, reason: str) -> None:
        """Record that a peer of the link, perhaps a member, will send nothing more."""
        with self.changed:
            if link_rank in self._members:
                source = self._members.index(link_rank)
                self._lose(source, f"rank {source} is lost: {reason}")
                self.notify()

    def _lose(self, source: int, text: str, done: int = 0) -> None:
        self._lost.setdefault(source, PeerLost(text, rank=source))
        self._left_after.setdefault(source, done)

    def _owing(self, ranks: Iterable[int], epoch: int) -> list[int]:
        """Return the ranks except those that finished this call before they left."""
        return [rank for rank in ranks if self._left_after.get(rank, 0) < epoch]

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def effective_timeout(self, timeout: float) -> float:
        return self.timeout if timeout < 0 else timeout

    def missing_for_any(self) -> list[int]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return others if others and all(rank in self._lost for rank in others) else []

    def wait_until(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        description: str,
        missing: Callable[[], list[int]],
        reason: str = NOT_CALLED,
    ) -> Steps:
        while True:
            with self.changed:
                if ready():
                    return
                self._check()
                late = missing()
                for rank in late:
                    if rank in self._lost:
                        text = f"{self._lost[rank]}, while rank {self.rank} needed it in {description}"
                        self._fail(PeerLost(text, rank=rank))
                if deadline.passed():
                    self._time_out(description, deadline, late, reason)
                self._check()
            yield

    def wait(self, steps: Steps) -> None:
        seen = self.changes
        with self._breaking_on_interrupt():
            for _ in steps:
                self._queue.drive(may_block=True)
                self._link.pause(self, seen)
                seen = self.changes

    def progress(self) -> None:
        self._queue.drive(may_block=False)
        self._link.poll()

    def notify(self) -> None:
        self.changes += 1
        self.changed.notify_all()

    def _progress_in_background(self) -> None:
        """Ensure that calls advance while no thread waits for them."""
        with self.changed:
            if self._thread is None and self._link.threads:
                self._thread = start_thread("ringcomm progress", self._progress_loop)
            self.notify()

    def _progress_loop(self) -> None:
        while True:
            with self.changed:
                while not (self._queue or self._matching or self._link.busy() or self._closed):
                    self.changed.wait()
                if self._closed:
                    return
                seen = self.changes
            with suppress(RingcommError):
                self._queue.drive(may_block=True)
                for receive in self._matching.expired():
                    receive.wait(0.0)  # raises
                self._link.pause(self, seen)

    # --- Failing ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._link.poll()
        self._check()

    def _check(self) -> None:
        self._check_open()
        if self._failure:
            raise copy(self._failure)  # keeps its attributes, and gets a traceback of its own

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ArgumentError("this communicator belongs to the parent process")
        if self._closed:
            raise ArgumentError("this communicator is closed")

    @contextmanager
    def _breaking_on_interrupt(self) -> Iterator[None]:
        """Break the group if a signal handler raises in the middle of a call, which the peers count on."""
        try:
            yield
        except RingcommError:
            raise
        except BaseException as error:
            self.interrupted(error)
            raise

    def _time_out(
        self,
        description: str,
        deadline: Deadline,
        late: list[int],
        reason: str = NOT_CALLED,
        lines: Sequence[str] = (),
    ) -> None:
        why = reason.format(format_ranks(late)) if late else "nothing arrived"
        text = f"rank {self.rank} waited {deadline.seconds:.3g} s in {description}: {why}"
        self._fail(CollectiveTimeout("\n".join([text, *lines]), rank=late[0] if late else self.rank))

    def time_out(self, description: str, deadline: Deadline) -> None:
        with self.changed:
            self._time_out(description, deadline, [])

    def interrupted(self, error: BaseException) -> Aborted:
        aborted = Aborted(f"rank {self.rank} was interrupted: {error!r}", rank=self.rank)
        with self.changed:
            self._fail(aborted)
        return aborted

    def _fail(self, error: RingcommError, notify_peers: bool = True) -> None:
        """Keep the first failure: from now on every call on every rank raises it."""
        if self._failure or self._closed:
            return
        self._failure = error
        if notify_peers:
            self._send_failure(error)
        self._matching.fail_all(error)
        for child in self._children:
            with child.changed:
                child._fail(self._for_child(error), notify_peers=False)
                child.notify()
        self.notify()

    def _for_child(self, error: RingcommError) -> RingcommError:
        if error.group:  # of an ancestor
            return copy(error)
        group = describe_ancestor(self.size)
        return type(error)(f"in {group}: {error}", rank=error.rank, group=group)

    def _send_failure(self, error: RingcommError) -> None:
        self._send_to_all({"kind": "failure", "error": encode_error(error)})

    def _send(self, rank: int, header: Header, payload: Bytes = NOTHING) -> None:
        self._link.send(self._members[rank], {**header, "group": self._group}, payload)

    def _send_to_all(self, header: Header) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._send(rank, header)

    # --- Ends and reports ---------------------------------------------------------------------------------------------

    def fail(self, error: RingcommError) -> None:
        self._check_open()
        with self.changed:
            self._check_open()
            self._fail(error)

    def close(self) -> bool:
        if self._process != os.getpid():  # the threads and connections are the parent's
            return True
        if self._queue.interrupted():
            with self.changed:
                self._fail(Aborted(f"rank {self.rank} was closed by a signal handler", rank=self.rank))
            return False
        with self.changed:
            if self._closed:
                return True
            if self._failure:  # a peer that has not received it must not take this for a normal close
                self._send_failure(self._failure)
            self._send_to_all({"kind": "closed", "epoch": self._done})
            self._closed = True
            self._matching.fail_all(ArgumentError("this communicator was closed"))
            self.notify()
        while self._queue:  # its calls end with an error
            self._queue.drive(may_block=True)
            self._link.pause(self, self.changes)
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
        self._leave()
        return True

    def _leave(self) -> None:
        staying = {self._members[rank] for rank in range(self.size) if rank not in (self.rank, *self._lost)}
        self._link.leave(self._group, staying, min(self.timeout, DRAIN) if self._failure else self.timeout)

    def report(self, calls: int) -> str:
        with self.changed:
            self._check_open()
            self._reports = {self.rank: self._flight.last(calls)}
            self._send_to_all({"kind": "report request", "calls": calls})
        self.wait(self._all_reports(Deadline(ANSWER)))
        with self.changed:
            return "".join(f"rank {rank}: {self._reports.get(rank, 'no answer')}\n" for rank in range(self.size))

    def _all_reports(self, deadline: Deadline) -> Steps:
        while len(self._reports) < self.size and not deadline.passed():
            yield
