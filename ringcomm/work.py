"""The handle of a call that may still run."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ringcomm.completion import call_back
from ringcomm.errors import RingcommError
from ringcomm.native import seconds
from ringcomm.transports.contract import Pending, Transport

__all__ = ["Both", "Unfinished", "Work"]


class Work:
    """A call that was started with `async_op=True`.

    Its arrays belong to the library until it is done: the source must not be written, the target not be read. Dropping
    the handle is allowed, the call runs on; closing or dropping the communicator ends it.
    """

    def __init__(
        self,
        start: Callable[..., Pending],
        call: tuple[Any, ...],
        result: Callable[[int], Any],
        arrays: object,
        unfinished: "Unfinished",
    ) -> None:
        self._pending: Pending | None = None
        self._result = result  # of the rank that sent, which only recv knows
        self._memory: object = (call, arrays)  # until it is done
        self._unfinished = unfinished
        self._value: Any = None
        self._error: RingcommError | None = None
        unfinished.add(self)  # before the start: a signal handler may raise right after it
        try:
            self._pending = start(*call)
        except RingcommError:  # nothing was started
            unfinished.discard(self)
            raise

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call is done and return its result, as the blocking call would have.

        Raises what the blocking call would have raised, also when asked again. A wait longer than `timeout` seconds
        (None: as long as the call itself may take) raises CollectiveTimeout and breaks the communicator, since the
        memory cannot be handed back otherwise. An exception that a signal handler raises breaks it for the same reason.

        Where the arrays are on a GPU the current stream waits, not the program, and what goes wrong there is raised by
        a later call; `synchronize` waits for both.
        """
        limit = seconds(timeout)
        pending = self._pending  # two threads may wait
        if pending is not None:
            try:
                self._value = self._result(pending.wait(limit))
            except RingcommError as error:
                if not pending.done():
                    raise  # refused: inside a signal handler
                self._error = error
            except BaseException:  # not the call's: a signal handler's, perhaps before the native wait had begun
                if not pending.done():
                    self._unfinished.stop(pending)
                raise
            if pending.done():  # on a GPU perhaps not yet: only the current stream has waited
                self._memory = self._pending = None
                self._unfinished.discard(self)
        if self._error is not None:
            raise self._error
        return self._value

    def synchronize(self, timeout: float | None = None) -> Any:
        """Wait until the call is done on the GPU as well, and return its result. Otherwise like `wait`."""
        self.wait(timeout)
        pending = self._pending
        if pending is not None and not pending.done():
            reached = threading.Event()
            pending.add_done_callback(reached.set)
            try:
                late = not reached.wait(timeout)
            except BaseException:  # a signal handler's
                self._unfinished.stop(pending)
                raise
            if late:
                self._unfinished.stop(pending, "waited too long")
        return self.wait()

    def done(self) -> bool:
        """Say whether the call is done, well or badly, and its arrays are the caller's again."""
        pending = self._pending
        if self._memory is not None and (pending is None or not pending.done()):
            return False
        self._unfinished.discard(self)
        return True

    @property
    def result(self) -> Any:
        """What the blocking call would have returned; waits for it."""
        return self.wait()

    def add_done_callback(self, callback: "Callable[[Work], object]") -> None:
        """Call `callback(self)` once the call is done, well or badly: at once if it is, else on a thread of ringcomm's.

        What it raises is logged.
        """
        pending = self._pending
        if pending is None:
            call_back(partial(callback, self))
        else:
            pending.add_done_callback(partial(callback, self))


class Both:
    """A send and a receive that are waited for as one."""

    def __init__(self, send: Work, recv: Work) -> None:
        self._send, self._recv = send, recv

    def wait(self, timeout: float) -> int:
        limit = None if timeout < 0 else timeout
        try:
            self._send.wait(limit)
        except RingcommError:
            with suppress(RingcommError):  # the first failure counts, but nothing may touch the memory after it
                self._recv.wait(limit)
            raise
        source: int = self._recv.wait(limit)
        return source

    def done(self) -> bool:
        return self._send.done() and self._recv.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self._send.add_done_callback(lambda _: self._recv.add_done_callback(lambda _: callback()))


class Unfinished:
    """The works whose memory the library may still touch: alive here, even if nobody else has them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._works: set[Work] = set()
        self._sweep_at = 16

    def add(self, work: Work) -> None:
        # Abandoned works are looked through when their number has doubled: a constant cost per call.
        if len(self._works) >= self._sweep_at:
            for other in tuple(self._works):
                other.done()  # leaves, if it is
            self._sweep_at = max(16, 2 * len(self._works))
        self._works.add(work)

    def discard(self, work: Work) -> None:
        self._works.discard(work)

    def stop(self, pending: Pending, why: str = "was interrupted by a signal during wait") -> None:
        """Break the communicator, so that the call ends and lets go of its memory."""
        with suppress(RingcommError):  # it is closed, which ends the call too
            self._transport.abort(f"rank {self._transport.rank} {why}")
        with suppress(RingcommError):  # the failure of the call
            pending.wait(-1.0)

    def clear(self) -> None:
        self._works.clear()
