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
from ringcomm.bootstrap.place import NONCE, RANK, RESTARTS, Place, environment_of, find_processes
from ringcomm.bootstrap.process_watch import is_stopped
from ringcomm.errors import PeerLost
from ringcomm.launcher.processes import EXIT_TIMEOUT
from ringcomm.launcher.ranks import Ranks, RankStart

__all__ = ["Restarts"]

# Seconds before a rank is started again that has died before it had joined: 1, 2, 4 and so on. At once it would die as
# often as it may within a moment, where the cause lasts longer, as a file server that does not answer.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
# A rank that was started again is ended if so many looks in a row find it stopped before it has joined, which is before
# stops.py reports it; and one that has joined, once another has waited too long for it. Seconds that passed while this
# launcher was stopped as well do not count.
CHECK_INTERVAL, STOPPED_CHECKS = 1.0, 3
PATIENCE = 1.0  # seconds for the launcher of node 0 to answer: meanwhile this one forwards nothing
KILL_TIMEOUT = 1.0  # seconds for the kernel to end what was killed
LATE = "was started again, but no rank is left that it could join"


class Restarts:
    """Starts ranks again as long as any other one is left that they could join, each `limit` times at most.

    It also ends what cannot come back by itself: processes that `shrink` has left out, those that are stopped and for
    which one that was started again has waited too long, those that were started again and are stopped or come too late
    to join any, and what a rank that has failed leaves running.

    Attributes:
        lost: The status of the first rank that was lost for good.
        grow_timed_out: A rank has waited too long for `grow`, which those who start ranks on other hosts have to hear.
    """

    def __init__(
        self, place: Place, limit: int, ranks: Ranks, start: Callable[[RankStart], None], report: Callable[[str], None]
    ) -> None:
        """`place`: of any rank; `start` starts a rank again; `report` prints a line for the user."""
        self._place, self._limit, self._ranks, self._start, self._report = place, limit, ranks, start, report
        self._membership = job_membership(place, PATIENCE)
        self.notices = Notices(place)
        self.lost, self.grow_timed_out = 0, False
        self._any_joined = False
        self._count: Counter[int] = Counter()
        self._joined: dict[int, int] = {}  # the process of each rank that has joined
        self._early: Counter[int] = Counter()  # deaths in a row before it had joined
        self._pending: dict[int, float] = {}  # when to start a rank
        self._ended: dict[int, str] = {}  # why, of ranks that were sent SIGTERM and have not ended yet
        self._kills: dict[int, float] = {}  # when to kill such a process
        self._awaited: set[int] = set()  # ranks that have joined and were stopped when one gave up waiting for `grow`
        self._stopped: Counter[int] = Counter()  # how many looks in a row have found a rank stopped
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
            elif notice.grow_timed_out:
                self.grow_timed_out = True
                self.end_stopped()
            else:
                self._end_left_out(notice.process)

    def leave_out(self, ranks: Iterable[int]) -> None:
        """End those of these ranks of the job that are on this host."""
        self.read()
        for rank in ranks:
            if rank in self._joined:
                self._end_left_out(self._joined[rank])

    def end_stopped(self) -> None:
        """End those that are stopped and have joined, unless they go on: one has waited too long for their `grow`."""
        self._awaited = self._stopped_of(self._joined)
        if self._awaited:
            self._check_at = time.monotonic()

    def close(self) -> None:
        self.notices.close()
        self._membership.close()

    def why_ended(self, rank: int) -> str:
        """Return why this rank was made to end; "" if it was not."""
        return self._ended.get(rank, "")

    def replace(self, rank: int, failure: PeerLost, *, over: bool) -> bool:
        """Start a rank that has failed again, or report why not; return False if the job ends with it.

        `over`: some rank has ended well.
        """
        self.read()
        self._kill_rest(rank)
        if rank not in self._joined:
            self._early[rank] += 1
        self._joined.pop(rank, None)
        self._awaited.discard(rank)
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
        """End ranks that are stopped, and those that have had none that they could join for EXIT_TIMEOUT."""
        running = self._ranks.running().items()
        late = {rank: pid for rank, pid in running if self._count[rank] and not {rank} & {*self._joined, *self._ended}}
        due = now >= self._check_at  # this is also called after every SIGCHLD
        any_watched = late or self._awaited
        self._check_at = min(math.inf if due else self._check_at, now + CHECK_INTERVAL) if any_watched else math.inf
        if not late or self._membership.any_registered():
            self._over_since = math.inf
            if due:
                self._end_stopped(late)
        else:
            self._over_since = min(self._over_since, now)
            if now >= self._over_since + EXIT_TIMEOUT:
                for rank, pid in late.items():
                    self._end(rank, pid, LATE)

    def _end_stopped(self, late: dict[int, int]) -> None:
        self._awaited = self._stopped_of(self._awaited)
        found = [rank for rank in late if any(is_stopped(pid, "T") for pid in self._processes_of(rank))]
        found += self._awaited
        self._stopped = Counter({rank: self._stopped[rank] + 1 for rank in found})
        for rank in [rank for rank in found if self._stopped[rank] == STOPPED_CHECKS]:
            if rank in late:
                self._end(rank, late[rank], "was stopped and ended")
            else:
                self._end(rank, self._joined[rank], "was stopped while another rank waited for it, and was ended")

    def _stopped_of(self, joined: Iterable[int]) -> set[int]:
        pids = {rank: self._joined[rank] for rank in joined}
        return {rank for rank, pid in pids.items() if is_stopped(pid, "T") and self._rank_of(pid) == rank}

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
        del self._stopped[rank]
        self._awaited.discard(rank)
        self._ended[rank], self._kills[pid] = reason, time.monotonic() + EXIT_TIMEOUT
        with suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.kill(pid, number)

    def _kill_rest(self, rank: int) -> None:
        """Kill what still runs of a rank that has ended: if that was a script, the rank itself may not have noticed."""
        rest = self._processes_of(rank)
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + KILL_TIMEOUT  # until it is no longer registered
        while rest and time.monotonic() < end:
            time.sleep(0.01)
            rest = self._processes_of(rank)

    def _processes_of(self, rank: int) -> list[int]:
        """Return the processes of a rank, which may have been started as the child of a script."""
        variables = {NONCE: self._place.nonce, RANK: str(rank), RESTARTS: str(self._count[rank])}
        return find_processes(self._ranks.group, variables)

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
