"""Until when a thread waits, and which thread's turn it is."""

import threading
import time

__all__ = ["INFINITE", "Deadline", "Turn"]

INFINITE = float("inf")


class Deadline:
    """The end of a wait that begins now and takes at most so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, or 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Turn:
    """Lets one thread at a time do something: `if turn.mine():` begin, do it, and end.

    A signal handler may raise between any two steps of that. A turn that its thread has left so is taken again by that
    thread, where a lock would be held for ever.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}  # a dictionary, for it is set if unset in one step
        self._begun = False

    def mine(self) -> bool:
        """Take the turn, unless another thread has it; say whether this one may begin."""
        me = threading.get_ident()
        return self._holder.setdefault("is", me) == me and not self._begun

    def begun_here(self) -> bool:
        """Say whether this thread is in the middle of it: then a signal handler asks."""
        return self._begun and self._holder.get("is") == threading.get_ident()

    def begin(self) -> None:
        self._begun = True

    def end(self) -> None:
        self._begun = False
        self._holder.clear()
