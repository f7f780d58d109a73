"""The flight record of a rank that sends messages: its last collectives, in words."""

import time
from collections import deque

__all__ = ["Flight"]

RECORDED = 1023  # calls, as in shared memory


class Call:
    """One collective: when it began, and when and how it ended."""

    def __init__(self, words: str, epoch: int) -> None:
        self.words, self.epoch = words, epoch
        self.began = time.monotonic()
        self.ended = 0.0
        self.outcome = ""

    def end(self, outcome: str) -> None:
        self.ended, self.outcome = time.monotonic(), outcome

    def __str__(self) -> str:
        now = time.monotonic()
        if not self.ended:
            return f"{self.words} epoch {self.epoch}, running for {now - self.began:.3f} s"
        took, since = self.ended - self.began, now - self.ended
        return f"{self.words} epoch {self.epoch}, {self.outcome} after {took:.2f} s, {since:.3f} s ago"


class Flight:
    """The last calls of a rank."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=RECORDED)

    def begin(self, words: str, epoch: int) -> Call:
        call = Call(words, epoch)
        self._calls.append(call)
        return call

    def last(self, calls: int) -> str:
        """Return the last calls in words, the latest first."""
        return "; ".join(map(str, [*self._calls][: -calls - 1 : -1])) or "no call yet"
