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
    """Lets one thread at a time do something: `if turn.mine():` set `begun`, do it, and at the end unset `begun` and
    clear `holder`.

    A signal handler may raise between any two steps of that. A turn that its thread has left so is taken again by that
    thread, where a lock would be held for ever. The end is no method: CPython looks for signals where a function is
    entered, and a turn that was not ended because of that would never come again.
    """

    def __init__(self) -> None:
        self.holder: dict[str, int] = {}  # a dictionary, for it is set if unset in one step
        self.begun = False

    def mine(self) -> bool:
        """Take the turn, unless another thread has it; say whether this one may begin."""
        me = threading.get_ident()
        return self.holder.setdefault("is", me) == me and not self.begun

    def begun_here(self) -> bool:
        """Say whether this thread is in the middle of it: then a signal handler asks."""
        return self.begun and self.holder.get("is") == threading.get_ident()
