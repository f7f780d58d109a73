"""What requests name: started operations, persistent ones, and operations of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ringcomm.errors import RingcommError
from ringcomm.mpi4py.base.attributes import call_user_function
from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG
from ringcomm.mpi4py.base.errors import FAILURES, Exception
from ringcomm.mpi4py.requests.status import Status, record
from ringcomm.transports import requests
from ringcomm.transports.messages import Envelope

__all__ = ["DONE", "EMPTY", "Done", "General", "PendingOperation", "Persistent", "fill", "wait_until"]

Found = TypeVar("Found")

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
        self.send, self.receive = send, receive

    def wait(self) -> Any:
        try:
            return self.receive.wait()
        finally:
            self.send.wait()  # also if the receive has failed: until then the memory is in use

    def done(self) -> bool:
        return self.receive.done() and self.send.done()


_ended = threading.Condition()  # notified when a watched operation ends


def note_end() -> None:
    """Tell the threads in `wait_until` that an operation has ended."""
    with _ended:
        _ended.notify_all()


def wait_until(found: Callable[[], Found], operations: Iterable[Any]) -> Found:
    """Wait until a function returns something that is true, as it does once some of the operations have ended."""
    for operation in operations:
        operation.watch()
    with _ended:
        while not (result := found()):
            _ended.wait()
    return result


def _watch(work: Any) -> None:
    if isinstance(work, Pair):
        _watch(work.send)
        _watch(work.receive)
    elif hasattr(work, "add_done_callback"):
        work.add_done_callback(lambda _: note_end())
    elif not work.done():
        requests.when_ended(work, note_end)


class PendingOperation(requests.PendingOperation):  # type: ignore[misc]  # its base is in C++
    """A started operation of a communicator, whose context is given.

    The core makes those of plain arrays, and waits for them: bindings/python/requests.cpp. Others have a work to wait
    for; `finish` takes the outcome of its wait, and returns the object received.
    """

    active = True  # a persistent one: between its start and its end

    context: Any
    _work: Any = None  # a Waitable
    _finish: Callable[[Any], Any] | None = None
    _completed: bool  # these are of the base
    _cancelled: bool
    _watched: bool
    _error: RingcommError | Exception | None = None
    _value: Any = None
    _envelope: tuple[int, int, int] = EMPTY

    def __init__(self, context: Any, work: Waitable, finish: Callable[[Any], Any] | None = None) -> None:
        self.context, self._work, self._finish = context, work, finish

    def done(self) -> bool:
        work: Any = super() if self._work is None else self._work
        return not self.active or self._completed or bool(work.done())

    def watch(self) -> None:
        """Let `wait_until` hear of the end."""
        if self.active and not self._watched:
            _watch(self if self._work is None else self._work)
            self._watched = True

    def complete(self, status: Status | None = None) -> Any:
        """Wait, once, and return the object received."""
        if not self.active:
            fill(status, EMPTY)
            return None
        if not self._completed:
            work: Any = super() if self._work is None else self._work
            try:
                outcome = work.wait()
                if isinstance(outcome, tuple):
                    self._envelope = outcome
                if self._finish:
                    self._value = self._finish(outcome)
            except FAILURES as error:
                self._error = error
            self._completed = True
        fill(status, self._envelope, self._cancelled)
        if self._error is not None:
            try:
                self.context.fail(self._error)
            except Exception as raised:  # next time as well: the error handler is asked once
                self._error = raised
                raise
        return self._value

    def with_send(self, send: PendingOperation) -> PendingOperation:
        """Return the operation of this receive and a send."""
        return PendingOperation(self.context, Pair(send._work, self._work), self._finish)

    def cancel(self) -> None:
        """Withdraw a receive that no message has matched yet."""
        cancel = super().cancel if self._work is None else getattr(self._work, "cancel", None)
        if cancel and self.active and not self._completed:
            try:
                self._completed = self._cancelled = cancel()
            except RingcommError as error:
                self.context.fail(error)

    def release(self) -> bool:
        """Return whether the request is null once the operation has completed."""
        return True

    def free(self) -> None:
        """Let the operation run on without a request. A thread then stores what it has received."""
        if self._finish and self.active and not self._completed:
            threading.Thread(target=self._complete_unseen, name="MPI.Request.Free", daemon=True).start()

    def _complete_unseen(self) -> None:
        with suppress(Exception):  # which the error handler knows
            self.complete()


class Persistent(requests.PersistentOperation, PendingOperation):  # type: ignore[misc]  # its base is in C++
    """An operation that can be started again and again: by the core if it is prepared, else by `start`."""

    active: bool  # of the base

    def __init__(self, context: Any, start: Callable[[], PendingOperation]) -> None:
        self.context, self._start = context, start

    def start(self) -> None:
        try:
            if not self.start_prepared():
                self._adopt(self._start())
        except FAILURES as error:
            self.context.fail(error)

    def _adopt(self, started: PendingOperation) -> None:
        """Be this operation, until the next start."""
        self._work, self._finish = started._work, started._finish
        self._completed = self._cancelled = self._watched = False
        self.active = True

    def release(self) -> bool:
        self.active, self._error, self._value, self._envelope = False, None, None, EMPTY
        return False


class General:
    """An operation of the program, which tells MPI when it is complete."""

    active = True

    def __init__(self, query: Any, free: Any, cancel: Any, args: Any, kwargs: Any) -> None:
        self._query, self._free, self._cancel = query, free, cancel
        self._args, self._kwargs = tuple(args or ()), dict(kwargs or {})
        self._completed = threading.Event()
        self._value: Any = None

    def end(self, value: Any) -> None:
        """Note that the operation is complete."""
        self._value = value
        self._completed.set()
        note_end()

    def done(self) -> bool:
        return self._completed.is_set()

    def watch(self) -> None:
        """Its end is noted in any case."""

    def complete(self, status: Status | None = None) -> Any:
        self._completed.wait()
        status = Status() if status is None else status
        fill(status, EMPTY)
        if self._query:
            call_user_function(self._query, status, *self._args, **self._kwargs)
        return self._value

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


def fill(status: Status | None, envelope: tuple[int, int, int], cancelled: bool = False) -> None:
    """Set a status, if there is one."""
    if status is not None:
        record(status, envelope)
        if cancelled:
            status.Set_cancelled(True)
