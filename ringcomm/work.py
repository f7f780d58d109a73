"""Works: the handles of calls that were started and may still run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ringcomm.completion import call_back, when_done
from ringcomm.errors import RingcommError
from ringcomm.native import StartedCall, ffi, seconds

__all__ = ["Work"]


class Work(StartedCall):  # type: ignore[misc]
    """A call started with `async_op=True`.

    Until it is done, do not write its source or access its target. The call runs on if the work is dropped; closing or
    dropping the communicator ends it.
    """

    # The fast path makes these objects without calling __init__ (bindings/fast_path.h).
    _ended = False  # whether a wait has seen the end
    _error: RingcommError | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call is done; return its result, or raise its error, as the blocking call would have.

        May be called again, with the same outcome. A wait longer than `timeout` seconds (None: the call's own limit)
        raises CollectiveTimeout and breaks the communicator, since the memory cannot be released otherwise. An
        exception of a signal handler breaks it for the same reason.

        For arrays on a GPU only the current stream waits, and a later call raises errors of the GPU; `synchronize`
        waits for the GPU too.
        """
        limit = seconds(timeout)
        if self._error is not None:
            raise self._error
        try:
            result = super().wait(limit)
        except RingcommError as error:
            if super().done():  # else refused, in a signal handler
                self._ended, self._error = True, error
            raise
        self._ended = True
        return result

    def synchronize(self, timeout: float | None = None) -> Any:
        """Like `wait`, but also wait until the GPU has done the call."""
        return self.wait(timeout)

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. Then its arrays are the caller's again."""
        done: bool = super().done()
        return done

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
        if self._ended:
            call_back(partial(callback, self))
        else:
            when_done(ffi.cast("rc_work *", self.address), partial(callback, self))
