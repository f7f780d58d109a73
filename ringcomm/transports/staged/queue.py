"""Calls that a thread runs one at a time, in the order in which they are queued."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from ringcomm.callbacks import call_back, call_back_apart
from ringcomm.errors import Aborted, CollectiveTimeout, MismatchError, RingcommError
from ringcomm.machine.threads import start_thread

__all__ = ["CallQueue", "QueuedCall"]


class QueuedCall:
    """A queued call (ringcomm.transports.calls.Pending)."""

    def __init__(self, queue: "CallQueue", name: str, run: Callable[[], object]) -> None:
        self._queue, self._name = queue, name
        self._run: Callable[[], object] | None = run  # and what it keeps alive, until it has run
        self._error: BaseException | None = None
        self._raised = False
        self.ended = threading.Event()
        self._callbacks: list[Callable[[], object]] = []

    def run(self) -> None:
        try:
            assert self._run
            self._run()
        except RingcommError as error:
            self._error = error.with_traceback(None)  # which would keep arrays alive, and this call
        except BaseException as error:  # any: the caller waits
            self._error = error
        self._run = None

    def end(self) -> None:
        self.ended.set()
        for callback in self._callbacks:
            self._queue.call_back(callback)

    def wait(self, timeout: float) -> int:
        if not self.ended.wait(None if timeout < 0 else timeout):
            self._queue.time_out(self._name, timeout)
            self.ended.wait()
        if self._error:
            self._raised = True
            raise self._error
        return -1

    def __del__(self) -> None:
        if isinstance(self._error, MismatchError) and not self._raised and self._queue.unraised is None:
            self._queue.unraised = self._error  # other errors break the group

    def done(self) -> bool:
        return self.ended.is_set()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        with self._queue.lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        call_back(callback)


class CallQueue:
    """The calls of one rank. `defer` is called with True when there are some, with False when none is left."""

    def __init__(self, rank: int, defer: Callable[[bool], object], fail: Callable[[RingcommError], None]) -> None:
        self.lock = threading.RLock()  # a signal handler may call in the middle
        self._rank, self._defer, self._fail = rank, defer, fail
        self._added = threading.Condition(self.lock)
        self._calls: deque[QueuedCall] = deque()  # the first one runs
        self._callbacks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.closing = False
        self.unraised: RingcommError | None = None  # the first of calls that nobody holds any more

    def add(self, name: str, run: Callable[[], object]) -> QueuedCall:
        call = QueuedCall(self, name, run)
        with self._added:
            if not self._thread:
                self._thread = start_thread("ringcomm staging", self._run_all)
            if not self._calls:
                self._defer(True)
            self._calls.append(call)
            self._added.notify()
        return call

    def take_unraised(self) -> RingcommError | None:
        error, self.unraised = self.unraised, None
        return error

    def __len__(self) -> int:
        return len(self._calls)

    def drain(self) -> None:
        """Wait for all calls that are queued."""
        with self.lock:
            last = self._calls[-1] if self._calls else None
        if not last:
            return
        try:
            last.ended.wait()
        except BaseException as interrupt:  # a signal: the other ranks wait for the call that comes next
            with suppress(RingcommError):
                text = f"rank {self._rank} was interrupted by a signal ({interrupt!r})"
                self._fail(Aborted(text, rank=self._rank))
            raise

    def close(self) -> None:
        """Let the thread end, after calls that fail at once because the communicator is closed."""
        with self._added:
            self.closing = True
            self._added.notify()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def time_out(self, name: str, timeout: float) -> None:
        text = f"rank {self._rank} waited {timeout:g} s for {name}"
        with suppress(RingcommError):  # the group has failed before
            self._fail(CollectiveTimeout(text, rank=self._rank, collective=name))

    def call_back(self, callback: Callable[[], object]) -> None:
        """Run callbacks in order, on threads of their own: they may wait for calls of this queue."""
        self._callbacks.put(callback)
        call_back_apart(lambda: self._callbacks.get()())

    def _run_all(self) -> None:
        while True:
            with self._added:
                while not self._calls:
                    if self.closing:
                        return
                    self._added.wait()
                call = self._calls[0]
            call.run()
            with self._added:
                self._calls.popleft()
                if not self._calls:
                    self._defer(False)
                call.end()
            del call  # and what it keeps alive
