"""Deadlines, and a lock that a signal handler cannot leave held."""

import threading
import time

__all__ = ["INFINITE", "Deadline", "ProgressLock"]

INFINITE = float("inf")


class Deadline:
    """The end of a wait that begins now and takes at most `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, or 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class ProgressLock:
    """Lets one thread at a time make progress: `if lock.acquire():` set `begun`, do the work, and at the end unset
    `begun` and clear `holder`.

    A signal handler may raise between any two of these steps. The thread can then acquire the lock again, where an
    ordinary lock would stay held forever. The end is not a method: CPython runs signal handlers on entry to a function,
    and one that raised there would leave the lock held.
    """

    def __init__(self) -> None:
        self.holder: dict[str, int] = {}  # a dictionary, as setdefault tests and sets in one step
        self.begun = False

    def acquire(self) -> bool:
        """Take the lock unless another thread holds it; return whether this thread may begin."""
        me = threading.get_ident()
        return self.holder.setdefault("is", me) == me and not self.begun

    def held_here(self) -> bool:
        """Return whether this thread has begun: then the caller is a signal handler."""
        return self.begun and self.holder.get("is") == threading.get_ident()
