"""The works of calls that a transport runs: those that the fast path does not start."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from ringcomm.callbacks import call_back
from ringcomm.errors import Aborted, RingcommError
from ringcomm.native import seconds
from ringcomm.transports.calls import Pending, StreamPending
from ringcomm.transports.contract import Transport
from ringcomm.work import Work

__all__ = ["PendingCalls", "PendingWork", "SendRecvPending"]


class PendingWork(Work):
    """A work whose call is a `Pending` of the transport."""

    def __init__(
        self,
        start: Callable[..., Pending],
        call: tuple[Any, ...],
        result: Callable[[int], Any],
        arrays: object,
        calls: "PendingCalls",
    ) -> None:
        self._pending: Pending | None = None
        self._result = result  # takes the sender's rank, which only recv knows
        self._memory: object = (call, arrays)  # until it is done
        self._calls = calls
        self._value: Any = None
        self._error: RingcommError | None = None
        calls.add(self)  # before the start: a signal handler may raise right after it
        try:
            self._pending = start(*call)
        except RingcommError:  # nothing was started
            calls.discard(self)
            raise

    def wait(self, timeout: float | None = None) -> Any:
        limit = seconds(timeout)
        pending = self._pending  # two threads may wait
        if pending is not None:
            try:
                self._value = self._result(pending.wait(limit))
            except RingcommError as error:
                if not pending.done():
                    raise  # refused, in a signal handler
                self._error = error
            except BaseException:  # of a signal handler, perhaps before the native wait began
                if not pending.done():
                    self._calls.stop(pending)
                raise
            if pending.done():  # on a GPU only the current stream has waited
                self._pending = None
            if self._pending is None or getattr(pending, "may_release", False):  # a StreamPending
                self._memory = None
                self._calls.discard(self)
        if self._error is not None:
            raise self._error
        return self._value

    def synchronize(self, timeout: float | None = None) -> Any:
        memory = self._memory  # which is in use until the end
        self.wait(timeout)
        if self.on_stream and (pending := cast(StreamPending, self._pending)) and not pending.done():
            pending.finish(seconds(timeout))
        del memory
        return self.wait()

    def done(self) -> bool:
        pending = self._pending
        if self._memory is not None if pending is None else not pending.done():
            return False
        self._calls.discard(self)
        return True

    @property
    def on_stream(self) -> bool:
        return bool(getattr(self._pending, "on_stream", False))  # only a StreamPending has it

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        pending = self._pending
        if pending is None:
            call_back(partial(callback, self))
        else:
            pending.add_done_callback(partial(callback, self))


class SendRecvPending:
    """The pending send and receive of a sendrecv: a StreamPending if either is on a GPU."""

    may_release = False

    def __init__(self, send: Work, recv: Work) -> None:
        self._send, self._recv = send, recv

    def wait(self, timeout: float) -> int:
        limit = None if timeout < 0 else timeout
        try:
            self._send.wait(limit)
        except RingcommError:
            with suppress(RingcommError):  # the first error is raised, but no memory may be in use then
                self._recv.wait(limit)
            raise
        source: int = self._recv.wait(limit)
        return source

    @property
    def on_stream(self) -> bool:
        return self._send.on_stream or self._recv.on_stream

    def finish(self, timeout: float) -> None:
        for work in (self._send, self._recv):
            work.synchronize(None if timeout < 0 else timeout)

    def done(self) -> bool:
        return self._send.done() and self._recv.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self._send.add_done_callback(lambda _: self._recv.add_done_callback(lambda _: callback()))


class PendingCalls:
    """Keeps the works of a communicator alive while the library may access their memory."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._works: set[PendingWork] = set()
        self._sweep_at = 16

    def add(self, work: PendingWork) -> None:
        # Dropped works are swept when their number has doubled: a constant cost per call.
        if len(self._works) >= self._sweep_at:
            self.release_ended()
            self._sweep_at = max(16, 2 * len(self._works))
        self._works.add(work)
        self._transport.fast_path.release_ended()  # where later starts are not its own

    def release_ended(self) -> None:
        """Let go of works that are done, so that the errors of dropped ones can be raised."""
        for work in tuple(self._works):
            work.done()  # discards it, if so

    def discard(self, work: PendingWork) -> None:
        self._works.discard(work)

    def stop(self, pending: Pending) -> None:
        """Break the communicator, so that the call ends and releases its memory."""
        with suppress(RingcommError):  # closed, which ends the call too
            rank = self._transport.rank
            self._transport.fail(Aborted(f"rank {rank} was interrupted by a signal during wait", rank=rank))
        with suppress(RingcommError):  # the failure of the call
            pending.wait(-1.0)

    def clear(self) -> None:
        self._works.clear()
