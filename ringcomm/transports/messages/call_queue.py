"""The collectives of a message group: a queue that any thread may drive, and the handles of the calls in it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringcomm.completion import call_back, call_back_apart
from ringcomm.errors import RingcommError
from ringcomm.transports.blocks import Steps
from ringcomm.transports.waits import INFINITE, Deadline, ProgressLock

__all__ = ["CallQueue", "ProgressEngine", "QueuedCall", "no_steps"]


class ProgressEngine(Protocol):
    """What the handles of calls and receives need of their group."""

    rank: int
    changed: threading.Condition

    def effective_timeout(self, timeout: float) -> float:
        """Return the timeout of a call in seconds; a negative argument stands for the group's own."""

    def missing_for_any(self) -> list[int]:
        """Return the ranks that a receive from any rank waits for in vain: all others if all are lost, else none."""

    def notify(self) -> None:
        """Wake all waiting threads after a change."""

    def progress(self) -> None:
        """Advance all calls as far as possible without waiting."""

    def wait(self, steps: Steps) -> None:
        """Run the steps of a wait, and advance all calls meanwhile."""

    def wait_until(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        description: str,
        missing: Callable[[], list[int]],
        reason: str,
    ) -> Steps:
        """Wait until `ready()`. `missing()` returns the ranks still needed, `reason` describes their fault: "{} …"."""

    def time_out(self, description: str, deadline: Deadline) -> None:
        """Break the group because a wait took too long."""

    def interrupted(self, error: BaseException) -> RingcommError:
        """Break the group because a call stopped halfway; return the error that its ranks raise."""


def no_steps() -> Steps:
    """Finish at once."""
    yield from ()


class QueuedCall:
    """A collective that the threads waiting for it, or for a later one, carry out step by step."""

    def __init__(self, engine: ProgressEngine, description: str, steps: Steps) -> None:
        self.steps = steps
        self.source = -1
        self.finished = False
        self.description = description
        self._engine = engine
        self._error: RingcommError | None = None
        self._callbacks: list[Callable[[], object]] = []

    def finish(self, error: RingcommError | None = None) -> None:
        """Mark the call as finished. Callable again after a signal handler has raised in here."""
        with self._engine.changed:
            if not self.finished:
                self._error, self.finished = error, True
                self._engine.notify()
        while self._callbacks:
            call_back_apart(self._callbacks.pop(0))

    def wait(self, timeout: float) -> int:
        if not self.finished:
            self._engine.wait(self._until_finished(timeout))
        if self._error:
            raise self._error
        return self.source

    def done(self) -> bool:
        if not self.finished:
            self._engine.progress()
        return self.finished

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        with self._engine.changed:
            if not self.finished:
                self._callbacks.append(callback)
                return
        call_back(callback)

    def _until_finished(self, timeout: float) -> Steps:
        """Wait for the end, also of a call that fails: afterwards nothing touches its memory."""
        deadline = Deadline(timeout if timeout >= 0 else INFINITE)
        while not self.finished:
            if deadline.passed():
                self._engine.time_out(self.description, deadline)
            yield


class CallQueue:
    """The collectives of a group, in order. Any thread may drive them, one at a time."""

    def __init__(self, engine: ProgressEngine) -> None:
        self._engine = engine
        self._calls: deque[QueuedCall] = deque()
        self._progress = ProgressLock()
        self.may_block = False  # whether the driving thread may wait for other ranks of its host

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: QueuedCall) -> bool:
        return call in self._calls

    def append(self, call: QueuedCall) -> None:
        self._calls.append(call)

    def interrupted(self) -> bool:
        """Return whether this thread is driving, so that the caller is a signal handler."""
        return self._progress.held_here()

    def drive(self, may_block: bool) -> None:
        """Advance the calls. `may_block` permits waiting for other ranks of this host, never for other hosts."""
        if self.interrupted():
            text = "a signal handler called a collective in the middle of another"
            raise RingcommError(text, rank=self._engine.rank)
        if not self._progress.acquire():
            return  # another thread drives
        try:
            self._progress.begun = True
            self.may_block = may_block
            while self._calls and self._step(self._calls[0]):
                self._calls.popleft()  # only after it has finished
        except BaseException as error:  # a signal, or out of memory: the state of the call is unknown
            self._engine.interrupted(error)
            raise
        finally:
            self._progress.begun = False
            self._progress.holder.clear()

    def _step(self, call: QueuedCall) -> bool:
        """Advance a call; return whether it has finished."""
        try:
            next(call.steps)
            return False
        except StopIteration:
            call.finish()
        except RingcommError as error:
            call.finish(error)
        except BaseException as error:
            call.finish(self._engine.interrupted(error))
            raise
        return True
