"""A group of ranks that send each other messages: who is in it, who has gone, how one waits, how it fails and ends."""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError, packed, unpacked
from ringcomm.store import ranks
from ringcomm.transports.blocks import Bytes, Steps
from ringcomm.transports.messages.flight import Flight
from ringcomm.transports.messages.handles import Queue
from ringcomm.transports.messages.letters import Letters
from ringcomm.transports.waits import Deadline

__all__ = ["Facts", "Membership", "MessageGroup", "Wire"]

FAREWELL = 2.0  # seconds in which peers take what was sent, if the group has failed: one may never look again
ANSWER = 1.0  # seconds in which a peer says what it does, for a report

Facts = dict[str, Any]


class Wire(Protocol):
    """What moves messages: in order between two ranks, whole, or not at all."""

    rank: int
    size: int
    threads: bool  # whether any thread may use it

    def send(self, peer: int, facts: Facts, payload: Bytes) -> None:
        """Queue a message. It returns at once; `payload` belongs to the wire."""

    def listen(self, group: str, listener: "MessageGroup") -> None:
        """Let `listener` take what comes for a group, and what has come before: by its `arrived` and `lost`."""

    def poll(self) -> None:
        """Take what has come, if no thread of the wire does that."""

    def busy(self) -> bool:
        """Say whether messages are under way that need somebody to poll."""

    def pause(self, group: "MessageGroup", seen: int) -> None:
        """Wait until there may be news: `group.news` is not `seen` any more, or some time has passed."""

    def leave(self, group: str, staying: set[int], timeout: float) -> None:
        """End that; the ranks `staying` have not ended it yet. When no group is left the wire says goodbye, and closes.

        It may wait, at most `timeout` seconds, until what was sent has been taken.
        """


@dataclass(frozen=True)
class Membership:
    """A rank's place in a group."""

    wire: Wire
    members: list[int]  # ranks on the wire
    group: str  # as messages name it
    timeout: float


class MessageGroup:
    """One rank's end of a group."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._wire, self._members, self._group = membership.wire, membership.members, membership.group
        self.rank = self._members.index(self._wire.rank)
        self.size = len(self._members)
        self.timeout = membership.timeout
        self.changed = threading.Condition(threading.RLock())  # guards all below
        self.news = 0  # counts what has changed
        self._epochs = itertools.count(1)
        self._done = 0  # the epoch of the last call that was done
        self._queue = Queue(self)
        self._letters = Letters()
        self._flight = Flight()
        self._reports: dict[int, str] = {}
        self._gone: dict[int, PeerLost] = {}
        self._left_after: dict[int, int] = {}  # epochs
        self._failure: RingcommError | None = None
        self._closed = False
        self._children: WeakSet[MessageGroup] = WeakSet()
        self._process = os.getpid()
        self._worker: threading.Thread | None = None
        self._wire.listen(self._group, self)

    # --- What comes from the wire, on its threads ---------------------------------------------------------------------

    def arrived(self, wire_rank: int, facts: Facts, payload: Bytes) -> None:
        """Take a message of this group."""
        source, kind = self._members.index(wire_rank), facts["kind"]
        with self.changed:
            if kind == "letter":
                self._letters.deliver(source, facts["tag"], facts["count"], facts["dtype"], payload)
            elif kind == "failure":
                self._fail(unpacked(facts["error"]), tell=False)
            elif kind == "closed":
                self._lose(source, f"rank {source} closed the communicator", facts["epoch"])
            elif kind == "report?":
                self._say(source, {"kind": "report", "text": self._flight.last(facts["calls"])})
            elif kind == "report":
                self._reports[source] = facts["text"]
            self.notify()

    def lost(self, wire_rank: int, reason: str) -> None:
        """Take notice that nothing more comes from a member, if it is one."""
        with self.changed:
            if wire_rank in self._members:
                source = self._members.index(wire_rank)
                self._lose(source, f"rank {source} is lost: {reason}")
                self.notify()

    def _lose(self, source: int, text: str, done: int = 0) -> None:
        self._gone.setdefault(source, PeerLost(text, rank=source))
        self._left_after.setdefault(source, done)

    def _owing(self, ranks: Iterable[int], epoch: int) -> list[int]:
        """Return those who have not left after they had done a call."""
        return [rank for rank in ranks if self._left_after.get(rank, 0) < epoch]

    # --- Waiting ------------------------------------------------------------------------------------------------------

    def limit(self, timeout: float) -> float:
        return self.timeout if timeout < 0 else timeout

    def needed_for_any(self) -> list[int]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return others if others and all(rank in self._gone for rank in others) else []

    def until(
        self, ready: Callable[[], bool], deadline: Deadline, words: str, missing: Callable[[], list[int]]
    ) -> Steps:
        while True:
            with self.changed:
                if ready():
                    return
                self._check()
                late = missing()
                for rank in late:
                    if rank in self._gone:
                        text = f"{self._gone[rank]}, while rank {self.rank} needed it in {words}"
                        self._fail(PeerLost(text, rank=rank))
                if deadline.passed():
                    self._late(words, deadline, late)
                self._check()
            yield

    def wait(self, steps: Steps) -> None:
        seen = self.news
        with self._breaking():
            for _ in steps:
                self._queue.drive(patient=True)
                self._wire.pause(self, seen)
                seen = self.news

    def progress(self) -> None:
        self._queue.drive(patient=False)
        self._wire.poll()

    def notify(self) -> None:
        self.news += 1
        self.changed.notify_all()

    def _work_on(self) -> None:
        """See to it that calls go on while nobody waits for them."""
        with self.changed:
            if self._worker is None and self._wire.threads:
                self._worker = threading.Thread(target=self._work, name="ringcomm messages", daemon=True)
                self._worker.start()
            self.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not (self._queue or self._letters or self._wire.busy() or self._closed):
                    self.changed.wait()
                if self._closed:
                    return
                seen = self.news
            with suppress(RingcommError):
                self._queue.drive(patient=True)
                for late in self._letters.overdue():
                    late.wait(0.0)  # raises
                self._wire.pause(self, seen)

    # --- Failing ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._wire.poll()
        self._check()

    def _check(self) -> None:
        self._check_open()
        if self._failure:
            raise copy(self._failure)  # with all its facts; each has frames of its own

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ArgumentError("this communicator belongs to the parent process")
        if self._closed:
            raise ArgumentError("this communicator is closed")

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Break the group if a signal handler raises in the middle of a call: the others count on its end."""
        try:
            yield
        except RingcommError:
            raise
        except BaseException as error:
            self.interrupted(error)
            raise

    def _late(
        self,
        words: str,
        deadline: Deadline,
        late: list[int],
        what: str = "it was not called by",
        lines: Sequence[str] = (),
    ) -> None:
        why = f"{what} {ranks(late)}" if late else "nothing came"
        text = f"rank {self.rank} waited {deadline.seconds:.3g} s in {words}: {why}"
        self._fail(CollectiveTimeout("\n".join([text, *lines]), rank=late[0] if late else self.rank))

    def give_up(self, words: str, deadline: Deadline) -> None:
        with self.changed:
            self._late(words, deadline, [])

    def interrupted(self, error: BaseException) -> Aborted:
        aborted = Aborted(f"rank {self.rank} was interrupted: {error!r}", rank=self.rank)
        with self.changed:
            self._fail(aborted)
        return aborted

    def _fail(self, error: RingcommError, tell: bool = True) -> None:
        """Keep the first failure, for all calls from now on, on all ranks."""
        if self._failure or self._closed:
            return
        self._failure = error
        if tell:
            self._tell(error)
        self._letters.end(error)
        for child in self._children:
            with child.changed:
                where = "in a communicator that this one was split from: "
                child._fail(type(error)(where + str(error), rank=None), tell=False)
                child.notify()
        self.notify()

    def _tell(self, error: RingcommError) -> None:
        self._say_to_all({"kind": "failure", "error": packed(error)})

    def _say(self, rank: int, facts: Facts, payload: Bytes | None = None) -> None:
        empty = np.empty(0, np.uint8) if payload is None else payload
        self._wire.send(self._members[rank], {**facts, "group": self._group}, empty)

    def _say_to_all(self, facts: Facts) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._say(rank, facts)

    # --- Ends and reports ---------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        self._check_open()
        with self.changed:
            self._check_open()
            self._fail(Aborted(f"rank {self.rank} aborted: {reason}", rank=self.rank))

    def close(self) -> bool:
        if self._process != os.getpid():  # threads and connections are the parent's
            return True
        if self._queue.interrupted():
            with self.changed:
                self._fail(Aborted(f"rank {self.rank} was closed by a signal handler", rank=self.rank))
            return False
        with self.changed:
            if self._closed:
                return True
            if self._failure:  # who has not heard of it must not think that this rank just left
                self._tell(self._failure)
            self._say_to_all({"kind": "closed", "epoch": self._done})
            self._closed = True
            self._letters.end(ArgumentError("this communicator was closed"))
            self.notify()
        while self._queue:  # its calls end, with an error
            self._queue.drive(patient=True)
            self._wire.pause(self, self.news)
        if self._worker and self._worker is not threading.current_thread():
            self._worker.join()
        self._leave()
        return True

    def _leave(self) -> None:
        staying = {self._members[rank] for rank in range(self.size) if rank not in (self.rank, *self._gone)}
        self._wire.leave(self._group, staying, min(self.timeout, FAREWELL) if self._failure else self.timeout)

    def report(self, calls: int) -> str:
        with self.changed:
            self._check_open()
            self._reports = {self.rank: self._flight.last(calls)}
            self._say_to_all({"kind": "report?", "calls": calls})
        self.wait(self._answers(Deadline(ANSWER)))
        with self.changed:
            return "".join(f"rank {rank}: {self._reports.get(rank, 'no answer')}\n" for rank in range(self.size))

    def _answers(self, deadline: Deadline) -> Steps:
        while len(self._reports) < self.size and not deadline.passed():
            yield
