"""Ranks that a signal has stopped: the others wait for them, and so does `ringcomm run`."""

import math
import time

from ringcomm.bootstrap.arrivals import format_ranks
from ringcomm.launcher.ranks import Ranks

__all__ = ["Stops"]

REPORT_AFTER = 5.0  # seconds


class Stops:
    """Which ranks are stopped, and since when."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._report_at: dict[int, float] = {}  # when to report a stopped rank; infinity: that was done

    @property
    def due(self) -> float:
        """When to call `found` next."""
        return min(self._report_at.values(), default=math.inf)

    def look(self) -> None:
        """Look again, as after SIGCHLD."""
        when = time.monotonic() + REPORT_AFTER
        self._report_at = {rank: self._report_at.get(rank, when) for rank in self._ranks.stopped()}

    def found(self) -> list[int]:
        """Once one has been stopped for a while, return those that are, each once."""
        if time.monotonic() < self.due:
            return []
        found = [rank for rank, when in self._report_at.items() if when < math.inf]
        self._report_at.update(dict.fromkeys(found, math.inf))
        return found

    def describe(self, ranks: list[int]) -> str:
        running = self._ranks.running()
        cure = "kill -CONT " + " ".join(str(running[rank]) for rank in ranks)
        return f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped; to continue: {cure}"
