"""What requests name: started operations, persistent ones, and those that the program itself completes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from ringcomm.errors import RingcommError
from ringcomm.mpi4py.attributes import call_user_function
from ringcomm.mpi4py.constants import ANY_SOURCE, ANY_TAG
from ringcomm.mpi4py.errors import ERR_REQUEST, FAILURES, Exception, failure
from ringcomm.mpi4py.status import Status, record
from ringcomm.transports.messages import Envelope

__all__ = ["DONE", "EMPTY", "Done", "General", "Persistent", "Started", "fill"]

Fail = Callable[[RingcommError | Exception], NoReturn]  # Context.fail

EMPTY = Envelope(ANY_SOURCE, ANY_TAG, 0)  # the status of sends, collectives and null requests


class Waitable(Protocol):
    """A Work of a communicator, or a MessageWork."""

    def wait(self) -> Any: ...
    def done(self) -> bool: ...


class Done:
    """An operation that had nothing to do, with the outcome of its wait."""

    def __init__(self, outcome: Any = None) -> None:
        self._outcome = outcome

    def wait(self) -> Any:
        return self._outcome

    def done(self) -> bool:
        return True


DONE = Done()


class Pair:
    """A send and a receive that are one operation."""

    def __init__(self, send: Waitable, receive: Waitable) -> None:
        self._send, self._receive = send, receive

    def wait(self) -> Any:
        try:
            return self._receive.wait()
        finally:
            self._send.wait()  # also if the receive has failed: until then the memory is in use

    def done(self) -> bool:
        return self._receive.done() and self._send.done()


class Started:
    """A started operation. `finish` takes the outcome of the wait, and returns the object received.

    `fail` is that of the communicator.
    """

    active = True

    def __init__(self, fail: Fail, work: Waitable, finish: Callable[[Any], Any] | None = None) -> None:
        self._fail, self._work, self._finish = fail, work, finish
        self._completed = self._cancelled = False
        self._error: RingcommError | Exception | None = None
        self._value: Any = None
        self._envelope = EMPTY

    def done(self) -> bool:
        return self._completed or self._work.done()

    def complete(self, status: Status | None = None) -> Any:
        """Wait, once, and return the object received."""
        if not self._completed:
            try:
                outcome = self._work.wait()
                if isinstance(outcome, Envelope):
                    self._envelope = outcome
                if self._finish:
                    self._value = self._finish(outcome)
            except FAILURES as error:
                self._error = error
            self._completed = True
        fill(status, self._envelope, self._cancelled)
        if self._error is not None:
            try:
                self._fail(self._error)
            except Exception as raised:  # next time as well: the error handler is asked once
                self._error = raised
                raise
        return self._value

    def with_send(self, send: Started) -> Started:
        """Return the operation of this receive and a send."""
        return Started(self._fail, Pair(send._work, self._work), self._finish)

    def cancel(self) -> None:
        """Withdraw a receive that no message has matched yet."""
        cancel = getattr(self._work, "cancel", None)
        if cancel and not self._completed:
            try:
                self._completed = self._cancelled = cancel()
            except RingcommError as error:
                self._fail(error)

    def release(self) -> bool:
        """Return whether the request is null once the operation has completed."""
        return True

    def free(self) -> None:
        """Let the operation run on without a request. A thread then stores what it has received."""
        if self._finish and not self._completed:
            threading.Thread(target=self._complete_unseen, name="MPI.Request.Free", daemon=True).start()

    def _complete_unseen(self) -> None:
        with suppress(Exception):  # which the error handler knows
            self.complete()


class Persistent:
    """An operation that can be started again and again."""

    def __init__(self, fail: Fail, start: Callable[[], Started]) -> None:
        self._fail, self._start = fail, start
        self._started: Started | None = None

    @property
    def active(self) -> bool:
        return self._started is not None

    def start(self) -> None:
        try:
            if self.active:
                raise failure(ERR_REQUEST, "expected a request that is not active: wait for it before its next start")
            self._started = self._start()
        except FAILURES as error:
            self._fail(error)

    def done(self) -> bool:
        return self._started is None or self._started.done()

    def complete(self, status: Status | None = None) -> Any:
        if self._started is None:
            fill(status, EMPTY)
            return None
        return self._started.complete(status)

    def cancel(self) -> None:
        if self._started:
            self._started.cancel()

    def release(self) -> bool:
        self._started = None
        return False

    def free(self) -> None:
        if self._started:
            self._started.free()
        self._started = None


class General:
    """An operation of the program, which tells MPI when it is complete."""

    active = True

    def __init__(self, query: Any, free: Any, cancel: Any, args: Any, kwargs: Any) -> None:
        self._query, self._free, self._cancel = query, free, cancel
        self._args, self._kwargs = tuple(args or ()), dict(kwargs or {})
        self.completed = threading.Event()
        self.value: Any = None

    def done(self) -> bool:
        return self.completed.is_set()

    def complete(self, status: Status | None = None) -> Any:
        self.completed.wait()
        status = Status() if status is None else status
        fill(status, EMPTY)
        if self._query:
            call_user_function(self._query, status, *self._args, **self._kwargs)
        return self.value

    def cancel(self) -> None:
        if self._cancel:
            call_user_function(self._cancel, self.done(), *self._args, **self._kwargs)

    def release(self) -> bool:
        self.free()
        return True

    def free(self) -> None:
        free, self._free = self._free, None
        if free:
            call_user_function(free, *self._args, **self._kwargs)


def fill(status: Status | None, envelope: Envelope, cancelled: bool = False) -> None:
    """Set a status, if there is one."""
    if status is not None:
        record(status, envelope)
        if cancelled:
            status.Set_cancelled(True)
