"""The flight record of a rank on the message transport: its last collectives."""

import time
from collections import deque

from ringcomm.transports.contract import RECORDED_CALLS

__all__ = ["FlightRecord"]


class FlightEntry:
    """One collective: when it began, and when and how it ended."""

    def __init__(self, description: str, epoch: int) -> None:
        self._title = f"{description} epoch {epoch}"
        self._began = time.monotonic()
        self._ended = 0.0
        self._outcome = ""

    def end(self, outcome: str) -> None:
        self._ended, self._outcome = time.monotonic(), outcome

    def __str__(self) -> str:
        now = time.monotonic()
        if not self._ended:
            return f"{self._title}, running for {now - self._began:.3f} s"
        return f"{self._title}, {self._outcome} after {self._ended - self._began:.2f} s, {now - self._ended:.3f} s ago"


class FlightRecord:
    """The last calls of a rank."""

    def __init__(self) -> None:
        self._entries: deque[FlightEntry] = deque(maxlen=RECORDED_CALLS)

    def begin(self, description: str, epoch: int) -> FlightEntry:
        entry = FlightEntry(description, epoch)
        self._entries.append(entry)
        return entry

    def last(self, calls: int) -> str:
        """Describe the last calls, the latest first."""
        return "; ".join(map(str, [*self._entries][: -calls - 1 : -1])) or "no call yet"
