"""The handles of calls of a group of ringcomm.transports.messages."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringcomm.completion import call_back, call_back_apart
from ringcomm.errors import RingcommError
from ringcomm.transports.blocks import Steps
from ringcomm.transports.waits import INFINITE, Deadline, Turn

__all__ = ["Group", "Queue", "Queued", "nothing"]


class Group(Protocol):
    """What a handle needs of its group."""

    rank: int
    changed: threading.Condition

    def limit(self, timeout: float) -> float:
        """Return the seconds a call may take that was given this timeout."""

    def needed_for_any(self) -> list[int]:
        """Return the ranks without which a receive from any rank is in vain: all, if all have gone, else none."""

    def notify(self) -> None:
        """Wake who waits, for something has changed."""

    def progress(self) -> None:
        """Let all calls go on as far as they can without waiting."""

    def wait(self, steps: Steps) -> None:
        """Go through the steps of a wait, and let all calls go on meanwhile."""

    def until(
        self, ready: Callable[[], bool], deadline: Deadline, words: str, missing: Callable[[], list[int]]
    ) -> Steps:
        """Wait until `ready()`, which the ranks `missing()` keep from being so."""

    def give_up(self, words: str, deadline: Deadline) -> None:
        """Break the group, because a wait took too long."""

    def interrupted(self, error: BaseException) -> RingcommError:
        """Break the group, because a call is half done; return what its ranks are told."""


def nothing() -> Steps:
    """Be done at once."""
    yield from ()


class Queued:
    """A collective, which is carried out step by step by whoever waits for it, or for one after it."""

    def __init__(self, group: Group, words: str, steps: Steps) -> None:
        self.steps = steps
        self.source = -1
        self.finished = False
        self._group, self.words = group, words
        self._error: RingcommError | None = None
        self._callbacks: list[Callable[[], object]] = []

    def finish(self, error: RingcommError | None = None) -> None:
        """Say that it is over. A signal handler may raise in here: then it is called again."""
        with self._group.changed:
            if not self.finished:
                self._error, self.finished = error, True
                self._group.notify()
        while self._callbacks:
            call_back_apart(self._callbacks.pop(0))

    def wait(self, timeout: float) -> int:
        if not self.finished:
            self._group.wait(self._until_finished(timeout))
        if self._error:
            raise self._error
        return self.source

    def done(self) -> bool:
        if not self.finished:
            self._group.progress()
        return self.finished

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        with self._group.changed:
            if not self.finished:
                self._callbacks.append(callback)
                return
        call_back(callback)

    def _until_finished(self, timeout: float) -> Steps:
        """Wait for the end, also if that is a failure: nothing touches the memory of the call after it."""
        deadline = Deadline(timeout if timeout >= 0 else INFINITE)
        while not self.finished:
            if deadline.passed():
                self._group.give_up(self.words, deadline)
            yield


class Queue:
    """The collectives of a group, in their order. Any thread may drive them, one at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._calls: deque[Queued] = deque()
        self._turn = Turn()
        self.patient = False  # whether who drives may wait

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, queued: Queued) -> bool:
        """Say whether it has yet to be driven to its end."""
        return queued in self._calls

    def append(self, queued: Queued) -> None:
        self._calls.append(queued)

    def interrupted(self) -> bool:
        """Say whether this thread is in the middle of driving: then a signal handler asks."""
        return self._turn.begun_here()

    def drive(self, patient: bool) -> None:
        """Go on; one who is patient may be kept waiting for other ranks of this host, but not for others."""
        if self.interrupted():
            raise RingcommError("a signal handler called a collective in the middle of another", rank=self._group.rank)
        if not self._turn.mine():
            return  # somebody else does
        try:
            self._turn.begun = True
            self.patient = patient
            while self._calls and self._step(self._calls[0]):
                self._calls.popleft()  # what is not among them is finished
        except BaseException as error:  # a signal, or there is no memory: nobody knows how far the call is
            self._group.interrupted(error)
            raise
        finally:
            self._turn.begun = False
            self._turn.holder.clear()

    def _step(self, queued: Queued) -> bool:
        """Go on with a call; say whether it is done."""
        try:
            next(queued.steps)
            return False
        except StopIteration:
            queued.finish()
        except RingcommError as error:
            queued.finish(error)
        except BaseException as error:
            queued.finish(self._group.interrupted(error))
            raise
        return True
