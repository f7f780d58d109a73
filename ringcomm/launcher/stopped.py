"""Ranks that a signal has stopped: the others wait for them, and so does `ringcomm run`, which reports them."""

import math
import time

from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.launcher.ranks import Ranks

__all__ = ["StoppedRanks"]

REPORT_AFTER = 5.0  # seconds


class StoppedRanks:
    """Which ranks are stopped, and since when."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._report_at: dict[int, float] = {}  # when to report a stopped rank; infinity: that was done

    @property
    def due(self) -> float:
        """When to call `report` next."""
        return min(self._report_at.values(), default=math.inf)

    def look(self) -> None:
        """Look again, as after SIGCHLD."""
        when = time.monotonic() + REPORT_AFTER
        self._report_at = {rank: self._report_at.get(rank, when) for rank in self._ranks.stopped()}

    def report(self) -> str:
        """Once one has been stopped for a while, name the stopped ranks, each once; "" if there are none."""
        if time.monotonic() < self.due:
            return ""
        found = [rank for rank, when in self._report_at.items() if when < math.inf]
        self._report_at.update(dict.fromkeys(found, math.inf))
        running = self._ranks.running()
        hint = "kill -CONT " + " ".join(str(running[rank]) for rank in found)
        return f"{format_ranks(found)} {'is' if len(found) == 1 else 'are'} stopped; to continue: {hint}"
