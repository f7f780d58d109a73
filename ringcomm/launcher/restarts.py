"""Which lost ranks are started again, and when (`ringcomm run --respawn`)."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ringcomm.bootstrap.joining import job_membership
from ringcomm.bootstrap.notices import TOO_LATE, Notices
from ringcomm.bootstrap.place import NONCE, RANK, RESTARTS, Place, environment_of
from ringcomm.bootstrap.process_watch import is_stopped
from ringcomm.errors import PeerLost
from ringcomm.launcher.processes import EXIT_TIMEOUT
from ringcomm.launcher.ranks import Ranks, RankStart

__all__ = ["Restarts"]

# Seconds before a rank is started again that has died before it had joined: 1, 2, 4 and so on. At once it would die as
# often as it may within a moment, where the cause lasts longer, as a file server that does not answer.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
LATE = "was started again, but no rank is left that it could join"


class Restarts:
    """Starts ranks again as long as any other one is left that they could join, each `limit` times at most.

    It also ends the processes that `shrink` has left out, which cannot come back by themselves, and those that come too
    late to join any.
    """

    def __init__(
        self, place: Place, limit: int, ranks: Ranks, start: Callable[[RankStart], None], report: Callable[[str], None]
    ) -> None:
        """`place`: of any rank; `start` starts a rank again; `report` prints a line for the user."""
        self._place, self._limit, self._ranks, self._start, self._report = place, limit, ranks, start, report
        self._membership = job_membership(place)
        self.notices = Notices(place)
        self.lost = 0  # the status of the first rank that was lost for good
        self._any_joined = False
        self._count: Counter[int] = Counter()
        self._joined: dict[int, int] = {}  # the process of each rank that has joined
        self._early: Counter[int] = Counter()  # deaths in a row before it had joined
        self._pending: dict[int, float] = {}  # when to start a rank
        self._ended: dict[int, str] = {}  # why, of ranks that were sent SIGTERM and have not ended yet
        self._kills: dict[int, float] = {}  # when to kill such a process
        self._over_since = self._check_at = math.inf  # since when late ranks have none to join; when to check again

    @property
    def due(self) -> float:
        """When to call `poll` next."""
        return min([*self._pending.values(), *self._kills.values(), self._check_at])

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def any_joined(self) -> bool:
        """Whether any rank of this launcher has ever joined."""
        self.read()
        return self._any_joined

    def read(self) -> None:
        """Read the notices of the ranks."""
        for notice in self.notices.read():
            if notice.joined is not None:
                self._any_joined = True
                self._joined[notice.joined] = notice.process
                del self._early[notice.joined]
            else:
                self._end_left_out(notice.process)

    def leave_out(self, ranks: Iterable[int]) -> None:
        """End those of these ranks of the job that are on this host."""
        self.read()
        for rank in ranks:
            if rank in self._joined:
                self._end_left_out(self._joined[rank])

    def close(self) -> None:
        self.notices.close()
        self._membership.close()

    def was_ended(self, rank: int) -> bool:
        """Return whether this rank was made to end."""
        return rank in self._ended

    def replace(self, rank: int, failure: PeerLost, *, over: bool) -> bool:
        """Start a rank that has failed again, or report why not; return False if the job ends with it.

        `over`: some rank has ended well.
        """
        self.read()
        if rank not in self._joined:
            self._early[rank] += 1
        self._joined.pop(rank, None)
        reason = self._ended.pop(rank, LATE if self._count[rank] and failure.got == TOO_LATE else "")
        text = f"rank {rank} {reason}" if reason else str(failure)
        present = self._any_joined and self._membership.any_registered()
        if present and self._count[rank] < self._limit:
            self._schedule(rank, text)
            return True
        if reason == LATE:
            self._report(text)
            return True
        if present or self._joined.keys() & self._ranks.running():  # which may have closed their communicator
            text += "; the others continue without it"
            self._membership.remove(rank)  # `grow` need not wait for it
        elif over:
            text += "; the others have ended"
        elif self._place.store and self.any_joined:
            text += "; those on other nodes, if any are left, continue without it"
        else:
            return False
        self.lost = self.lost or failure.got
        self._report(text)
        return True

    def end_well(self, rank: int) -> None:
        """Note that a rank has ended as it should: `grow` need not wait for it."""
        if self._membership.any_registered():
            self._membership.remove(rank)

    def poll(self) -> None:
        """Start what is due, and end what is late or was left out. Also called when a rank has ended."""
        self.read()
        now = time.monotonic()
        for pid in [pid for pid, when in self._kills.items() if when <= now]:
            del self._kills[pid]
            with suppress(ProcessLookupError):
                if self._rank_of(pid) is not None:
                    os.kill(pid, signal.SIGKILL)
        if self._pending and not self._membership.any_registered():
            self.cancel("no rank is left that it could join")
        for rank in [rank for rank, when in self._pending.items() if when <= now]:
            del self._pending[rank]
            before = self._ranks.started(rank)
            environment = {**before.environment, RESTARTS: str(self._count[rank])}
            self._start(replace(before, environment=environment))
        self._end_late(now)

    def _end_late(self, now: float) -> None:
        """End ranks that were started again and have not joined, EXIT_TIMEOUT after the last that they could join."""
        running = self._ranks.running().items()
        late = {rank: pid for rank, pid in running if self._count[rank] and not {rank} & {*self._joined, *self._ended}}
        if late and not self._membership.any_registered():
            self._over_since = min(self._over_since, now)
            self._check_at = self._over_since + EXIT_TIMEOUT
            if now >= self._check_at:
                for rank, pid in late.items():
                    self._end(rank, pid, LATE)
                self._check_at = math.inf
        else:
            self._over_since, self._check_at = math.inf, now + EXIT_TIMEOUT if late else math.inf

    def cancel(self, reason: str = "") -> None:
        """Start nothing any more."""
        for rank in self._pending:
            if reason:
                self._report(f"rank {rank} is not started again: {reason}")
        self._pending.clear()

    def _schedule(self, rank: int, text: str) -> None:
        self._count[rank] += 1
        often = f"({self._count[rank]} of {self._limit})"
        if early := self._early[rank]:
            pause = min(FIRST_PAUSE * 2.0 ** (early - 1), LONGEST_PAUSE)
            self._report(f"{text} before it had joined; started again in {pause:g} s {often}")
        else:
            pause = 0.0
            self._report(f"{text}; started again {often}")
        self._pending[rank] = time.monotonic() + pause

    def _end_left_out(self, pid: int) -> None:
        if pid not in self._kills and (rank := self._rank_of(pid)) is not None:  # each survivor sends a notice
            what = "was stopped" if is_stopped(pid) else "did not come to shrink"
            self._end(rank, pid, f"{what}, was left out by the others and ended")

    def _end(self, rank: int, pid: int, reason: str) -> None:
        self._ended[rank], self._kills[pid] = reason, time.monotonic() + EXIT_TIMEOUT
        with suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.kill(pid, number)

    def _rank_of(self, pid: int) -> int | None:
        """Return which rank this process is; None if it is none, or was started before.

        It may be the child of a script that was started: then its environment tells.
        """
        for rank, started in self._ranks.running().items():
            if pid == started:
                return rank
        try:
            environment = environment_of(pid)
        except OSError:  # it has ended
            return None
        text = environment.get(RANK, "")
        if environment.get(NONCE) != self._place.nonce or not text.isdecimal():
            return None
        return int(text) if environment.get(RESTARTS) == str(self._count[int(text)]) else None
