"""The standard input of `ringcomm run`, which rank 0 reads, as under mpirun."""

import os
import select
import threading
from contextlib import suppress

from ringcomm.machine.threads import start_thread

__all__ = ["RankInput"]

CHECK_INTERVAL = 0.2  # seconds between two checks whether this process has come to the foreground


class RankInput:
    """Passes the standard input of this process on to a rank.

    A file or a pipe is inherited. A terminal stops a process that reads it and is not of the group in its foreground,
    as the ranks are: a thread passes on what is typed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def descriptor(self) -> int:
        """Return what the rank reads."""
        if not os.isatty(0):
            return 0
        if self._thread is None:
            (self._output, pipe), (self._end, self._ends) = os.pipe(), os.pipe()
            self._thread = start_thread("ringcomm input", self._pass_on, pipe)
        return self._output

    def close(self) -> None:
        """End the thread, after the rank."""
        if self._thread is not None:
            os.close(self._output)
            os.close(self._ends)
            self._thread.join()
            os.close(self._end)

    def _pass_on(self, pipe: int) -> None:
        with suppress(BrokenPipeError), open(pipe, "wb") as target:
            while text := self._typed():
                target.write(text)
                target.flush()

    def _typed(self) -> bytes:
        """Return what was typed; nothing at its end, and at the end of the ranks."""
        while True:
            here = _in_foreground()
            ready, _, _ = select.select(
                [self._end, 0] if here else [self._end], [], [], None if here else CHECK_INTERVAL
            )
            if self._end in ready:
                return b""
            if ready and _in_foreground():
                return os.read(0, 4096)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # it is not the terminal of this session, and stops nobody
        return True
