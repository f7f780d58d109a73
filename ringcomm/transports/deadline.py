"""The deadline of a wait in Python: the core keeps those of its own calls."""

import time

__all__ = ["Deadline"]


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
