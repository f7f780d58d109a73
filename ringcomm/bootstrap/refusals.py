"""The log of refused peers: a process that tries again and again must not fill a disk."""

import logging
import re
import time

__all__ = ["RefusalLog"]

log = logging.getLogger("ringcomm")

INTERVAL = 1.0  # seconds between two lines for the same kind of reason


class RefusalLog:
    """Logs the first refusal at once, and those of the next second in one line for each kind of reason.

    Reasons of a kind differ in numbers only, so the kinds are few, and a flood of one does not hide another.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}  # by kind: the last refusal, and their number since the last line
        self._next = 0.0  # the time from which lines may be logged

    def add(self, peer: str, reason: str) -> None:
        kind = re.sub(r"-?\d+", "", reason)
        _, count = self._held.get(kind, ("", 0))
        self._held[kind] = f"{peer}: {reason}", count + 1
        self.poll()

    def due(self) -> float | None:
        """Return the seconds until `poll` logs a line; None if there is nothing to log."""
        return max(0.0, self._next - time.monotonic()) if self._held else None

    def poll(self) -> None:
        if self.due() == 0:
            self.flush()

    def flush(self) -> None:
        """Log what has not been logged."""
        if self._held:
            for last, count in self._held.values():
                others = f" (and {count - 1} other attempts in the last second)" if count > 1 else ""
                log.warning("refused %s%s", last, others)
            self._held, self._next = {}, time.monotonic() + INTERVAL
