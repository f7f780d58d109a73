"""The handle of a call that may still run."""

from collections.abc import Callable
from typing import Any

from ringcomm.native import seconds
from ringcomm.transports.contract import Pending

__all__ = ["Both", "Unfinished", "Work"]


class Work:
    """A call that was started with `async_op=True`.

    Its arrays belong to the library until it is done: the source must not be written, the target not be read. Dropping
    the handle is allowed, the call runs on; closing or dropping the communicator ends it.
    """

    def __init__(
        self, pending: Pending, result: Callable[[int], Any], memory: object, unfinished: "Unfinished"
    ) -> None:
        self._pending: Pending | None = pending
        self._result = result  # of the rank that sent, which only recv knows
        self._memory: object = memory
        self._unfinished = unfinished
        self._value: Any = None
        self._error: BaseException | None = None
        unfinished.add(self)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call is done and return its result, as the blocking call would have.

        Raises what the blocking call would have raised, also when asked again. A wait longer than `timeout` seconds
        (None: as long as the call itself may take) raises CollectiveTimeout and breaks the communicator, since the
        memory cannot be handed back otherwise.
        """
        limit = seconds(timeout)
        pending = self._pending  # two threads may wait
        if pending is not None:
            try:
                self._value = self._result(pending.wait(limit))
            except BaseException as error:
                self._error = error
            self._pending = self._memory = None
            self._unfinished.discard(self)
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Say whether the call is done, well or badly, and its arrays are the caller's again."""
        pending = self._pending
        if pending is not None and not pending.done():
            return False
        self._unfinished.discard(self)
        return True

    @property
    def result(self) -> Any:
        """What the blocking call would have returned; waits for it."""
        return self.wait()


class Both:
    """A send and a receive that are waited for as one."""

    def __init__(self, send: Work, recv: Work) -> None:
        self._send, self._recv = send, recv

    def wait(self, timeout: float) -> int:
        limit = None if timeout < 0 else timeout
        try:
            self._send.wait(limit)
        finally:  # also after a failure: nothing may touch the memory any more
            source: int = self._recv.wait(limit)
        return source

    def done(self) -> bool:
        return self._send.done() and self._recv.done()


class Unfinished:
    """The works whose memory the library may still touch: alive here, even if nobody else has them."""

    def __init__(self) -> None:
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

    def clear(self) -> None:
        self._works.clear()
