"""Works: the handles of calls that were started and may still run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ringcomm.callbacks import call_back, when_done
from ringcomm.errors import RingcommError
from ringcomm.native import StartedCall, ffi, seconds

__all__ = ["StartedWork", "Work"]


class Work:
    """A call started with `async_op=True`.

    Until it is done, do not write its source or access its target. The call runs on if the work is dropped; closing or
    dropping the communicator ends it. The error of one whose work was dropped is raised by `check` or `close` of the
    communicator: see docs/errors.md.
    """

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call is done; return its result, or raise its error, as the blocking call would have.

        May be called again, with the same outcome. A wait longer than `timeout` seconds (None: the call's own limit)
        raises CollectiveTimeout and breaks the communicator, since the memory cannot be released otherwise. An
        exception of a signal handler breaks it for the same reason.

        For arrays on a GPU only the current stream waits, and a later call raises errors of the GPU; `synchronize`
        waits for the GPU too.
        """
        raise NotImplementedError

    def synchronize(self, timeout: float | None = None) -> Any:
        """Like `wait`, but also wait until the GPU has done the call."""
        return self.wait(timeout)

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. Then its arrays are the caller's again."""
        raise NotImplementedError

    @property
    def result(self) -> Any:
        """The result of `wait()`."""
        return self.wait()

    @property
    def on_stream(self) -> bool:
        """Whether `wait` makes the current stream of a GPU wait, and not the caller."""
        return False

    def add_done_callback(self, callback: "Callable[[Work], object]") -> None:
        """Call `callback(self)` when the call ends: immediately if it has, else on a thread of ringcomm.

        Exceptions of the callback are logged.
        """
        raise NotImplementedError


class StartedWork(Work, StartedCall):  # type: ignore[misc]  # StartedCall is in C++
    """A work whose call the fast path has started, without calling __init__ (bindings/python/fast_path.h)."""

    _ended = False  # whether a wait has seen the end
    _error: RingcommError | None = None

    def wait(self, timeout: float | None = None) -> Any:
        limit = None if timeout is None else seconds(timeout)
        if self._error is not None:
            raise self._error
        try:
            result = StartedCall.wait(self, limit)
        except RingcommError as error:
            if StartedCall.done(self):  # else refused, in a signal handler
                self._ended, self._error = True, error
            raise
        self._ended = True
        return result

    def done(self) -> bool:
        return bool(StartedCall.done(self))

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        if self._ended:
            call_back(partial(callback, self))
        else:
            when_done(ffi.cast("rc_work *", self.address), partial(callback, self))
