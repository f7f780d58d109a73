"""The log of refused peers: a process that tries again and again must not fill a disk."""

import logging
import time

__all__ = ["RefusalLog"]

log = logging.getLogger("ringcomm")

INTERVAL = 1.0  # seconds between two lines


class RefusalLog:
    """Logs the first refusal at once, and those of the next second in one line, with their number."""

    def __init__(self) -> None:
        self._peer = self._reason = ""  # of the last refusal
        self._held = 0  # refusals since the last line
        self._next = 0.0  # the time from which a line may be logged

    def add(self, peer: str, reason: str) -> None:
        self._peer, self._reason = peer, reason
        self._held += 1
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
            others = f" (and {self._held - 1} other attempts in the last second)" if self._held > 1 else ""
            log.warning("refused %s: %s%s", self._peer, self._reason, others)
            self._held, self._next = 0, time.monotonic() + INTERVAL
