"""What to do about a rank that cannot be reached: it may be slow, have closed, or be lost.

Nothing listens at the address of a rank that has closed its last communicator, nor of one that has died; or a server
with another secret does, since RINGCOMM_PORT_RANGE leaves few ports. The others of its host know which: they are asked
in turn, until one answers. If none of them listens any more, the whole host has closed. A host that answers nobody is
lost in time.
"""

import math
import time
from collections.abc import Sequence

from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT, WrongSecret

__all__ = ["LEFT", "RUNS", "SLICE", "Search"]

SLICE = 0.05  # seconds between two attempts to connect to a rank
RUNS, LEFT, LOST = b"runs", b"left", b""  # what has become of a rank; or how it has died


class Search:
    """For a connection to a rank, which the `others` of its host are asked about.

    `patience`: seconds after which a host that does not answer is lost.
    """

    def __init__(self, rank: int, others: Sequence[int], patience: float) -> None:
        self._rank, self._others, self._patience = rank, others, patience
        self.again()
        self.due = 0.0

    def again(self) -> None:
        """Start anew: the host has answered."""
        self._answered = time.monotonic()
        self._restart()

    def next(self) -> tuple[int, float]:
        """Return the rank to connect to now, and until when to wait for its answer."""
        self.due = math.inf  # until that attempt has ended
        limit = min(time.monotonic() + HANDSHAKE_TIMEOUT, self._answered + self._patience)
        return self._targets.pop(0), limit if self._others else math.inf

    def fail(self, error: OSError, answers: bool) -> bytes | None:
        """Note how the attempt has failed, and whether that host had answered; return what is clear now."""
        now = time.monotonic()
        if answers or isinstance(error, ConnectionError):
            self._answered = now
        if now >= self._answered + self._patience:
            return LOST
        self._refused &= isinstance(error, ConnectionRefusedError | WrongSecret)
        if self._targets:
            self.due = now
        elif self._refused and self._others:
            return LEFT
        else:
            self._restart()
        return None

    def _restart(self) -> None:
        self.due = time.monotonic() + SLICE
        self._targets = [self._rank, *self._others]
        self._refused = True  # by all of them: nothing listens there
