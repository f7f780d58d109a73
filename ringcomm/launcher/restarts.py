"""Which lost ranks are restarted, and when (`ringcomm run --respawn`)."""

import json
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.membership import TOO_LATE, Member, removed
from ringcomm.bootstrap.place import RESTARTS, Place
from ringcomm.bootstrap.processes import is_stopped
from ringcomm.bootstrap.session import MEMBERS
from ringcomm.bootstrap.wire.framing import Frame
from ringcomm.errors import PeerLost, RingcommError
from ringcomm.launcher.processes import EXIT_TIMEOUT
from ringcomm.launcher.rank_state import LaunchedRank, State
from ringcomm.launcher.ranks import Ranks, RankStart

__all__ = ["Restarts"]

# Seconds before a rank is restarted that has died before it had joined: 1, 2, 4 and so on. At once it would die as
# often as it may within a moment, where the cause lasts longer, as a file server that does not answer.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
# A restarted rank is ended if so many looks in a row find it stopped before it has joined, which is before the
# supervisor reports it; and one that has joined, once another has waited too long for it. Seconds in which this
# launcher was stopped as well do not count.
CHECK_INTERVAL, STOPPED_CHECKS = 1.0, 3
JOIN_TIMEOUT = 30.0  # seconds to join the session of the members, whose server runs
PATIENCE = 1.0  # seconds for the launcher of node 0 to answer: meanwhile this one forwards nothing
LATE = "was restarted, but no rank is left that it could join"


class Restarts:
    """Starts a rank again, up to `place.max_restarts` times, as long as any other one is left that it could join.

    It also ends what cannot come back by itself: processes that `shrink` has left out, those that are stopped and for
    which one that was restarted has waited too long, those that were restarted and are stopped or come too late
    to join any, and what a rank that has failed leaves running.

    `fileno` is readable when `read` has something to read: the membership of the job, see membership.py.

    Attributes:
        lost: The status of the first rank that was lost for good.
        any_joined: Whether any rank of this launcher has ever joined.
        over: The membership has ended, and with it the job.
    """

    def __init__(
        self,
        place: Place,
        keepalive: float,
        ranks: Ranks,
        start: Callable[[RankStart], None],
        report: Callable[[str], None],
    ) -> None:
        """`place`: of any rank; `start` restarts a rank; `report` prints a line for the user."""
        self._place, self._ranks, self._start, self._report = place, ranks, start, report
        self._limit = place.max_restarts or 0
        self._members: defaultdict[int, LaunchedRank] = defaultdict(LaunchedRank)
        self._registered: dict[int, Member] = {}  # the ranks of the job that can call `grow`
        self.lost, self.any_joined, self.over = 0, False, False
        self._over_since = self._check_at = math.inf  # since when late ranks have none to join; when to check again
        host, here = find_endpoint(place, keepalive), replace(place, rank=-1, members=())
        self._store = Client(host, MEMBERS, here, JOIN_TIMEOUT, watch=self._note, patience=PATIENCE)

    @property
    def due(self) -> float:
        """When to call `poll` next."""
        return min([self._check_at, *(each.deadline for each in self._members.values())])

    @property
    def pending(self) -> bool:
        return any(each.state is State.PENDING for each in self._members.values())

    def fileno(self) -> int:
        return self._store.fileno()

    def close(self) -> None:
        self._store.close()

    def read(self) -> None:
        """Take what has come."""
        try:
            if not self.over:
                self._store.receive(None, 0.0)
        except PeerLost:  # the launcher of node 0 is lost, as nodes.py will say
            self.over = True

    def _read_all(self) -> None:
        """Take what ranks have told of which this launcher knows that they have ended."""
        if not self.over:
            with suppress(RingcommError):
                self._store.find("")  # its answer comes behind all changes

    def _note(self, change: Frame) -> None:
        what, _, which = change.fields["key"].partition("/")
        if what == "member":
            self._note_member(int(which), Member(*json.loads(change.payload)) if change.fields["set"] else None)
        elif not change.fields["set"]:
            return
        elif what == "waited":
            self._watch_stopped()
        elif what == "left_out":
            self._end_left_out(*map(int, which.split("/")))

    def _note_member(self, rank: int, fact: Member | None) -> None:
        if fact is None:
            self._registered.pop(rank, None)
            return
        self._registered[rank] = fact
        member = self._members.get(rank, LaunchedRank())
        if fact.first == self._place.first and fact.joined and fact.restarts == member.restarts:
            self.any_joined, self._members[rank] = True, member
            member.process, member.early, member.joined = fact.process, 0, member.alive

    def _any_registered(self) -> bool:
        """Return whether any rank of the job can call `grow`. Of those here this launcher knows it first."""
        own, members = self._place.first, self._registered.items()
        return any(fact.first != own or self._ranks.rank_of(fact.process) == rank for rank, fact in members)

    def _watch_stopped(self) -> None:
        """End stopped members, unless they go on: a rank has waited too long for their `grow`."""
        for rank, member in self._members.items():
            member.blocks_joiner = member.joined and self._is_stopped(rank, member)
        if any(member.blocks_joiner for member in self._members.values()):
            self._check_at = time.monotonic()

    def _is_stopped(self, rank: int, member: LaunchedRank) -> bool:
        processes = [member.process] if member.joined else self._ranks.processes_of(rank)
        return any(is_stopped(each, "T") and self._ranks.rank_of(each) == rank for each in processes)

    def why_ended(self, rank: int) -> str:
        """Return why this rank was made to end; "" if it was not."""
        return self._members[rank].reason

    def restart_or_report(self, rank: int, failure: PeerLost, *, over: bool) -> bool:
        """Restart a rank that has failed, or report why not; return False if the job ends with it.

        `over`: some rank has ended well.
        """
        self._read_all()
        self._ranks.kill_rest(rank)
        member = self._members[rank]
        if not member.joined:
            member.early += 1
        reason = member.reason or (LATE if member.restarts and failure.got == TOO_LATE else "")
        member.blocks_joiner, member.reason = False, ""
        text = f"rank {rank} {reason}" if reason else str(failure)
        present = self.any_joined and self._any_registered()
        if present and member.restarts < self._limit:
            self._schedule(rank, text)
            return True
        member.move("is lost")
        if reason == LATE:
            self._report(text)
            return True
        if present or self._any_joined_runs():  # which may have closed its communicator
            text += "; the others continue without it"
            self._remove(rank)
        elif over and self.any_joined:
            text += "; the others have ended"
        elif self._place.hosts and self.any_joined:
            text += "; those on other nodes, if any are left, continue without it"
        else:
            return False
        self.lost = self.lost or failure.got
        self._report(text)
        return True

    def end_well(self, rank: int) -> None:
        """Note that a rank has ended as it should."""
        self._members[rank].move("is lost")
        if self._any_registered():
            self._remove(rank)

    def tell_of_end(self, ranks: Iterable[int]) -> None:
        """Tell the server that these ranks come to no start any more, so that none waits in `init` for them."""
        with suppress(PeerLost):
            for rank in ranks:
                self._store.tell("ended", rank=rank)

    def _remove(self, rank: int) -> None:
        """Tell the members that `grow` need not wait for a rank."""
        with suppress(PeerLost):
            self._store.tell("keep", key=removed(rank))

    def _any_joined_runs(self) -> bool:
        """Return whether any rank that has joined runs on: one that is made to end does not."""
        running = [self._members[rank] for rank in self._ranks.running()]
        return any(member.joined and member.state is State.RUNNING for member in running)

    def poll(self) -> None:
        """Start what is due, and end what is late or was left out. Also called when a rank has ended."""
        self.read()
        now = time.monotonic()
        if self.pending and not self._any_registered():
            self.cancel("no rank is left that it could join")
        for rank, member in [*self._members.items()]:
            if member.deadline > now:
                continue
            if member.move("is started"):
                before = self._ranks.started(rank)
                environment = {**before.environment, RESTARTS: str(member.restarts)}
                self._start(replace(before, environment=environment))
            else:  # it was sent SIGTERM
                member.deadline = math.inf
                self._kill(member.process)
        self._end_late(now)

    def _kill(self, process: int) -> None:
        with suppress(ProcessLookupError):
            if self._ranks.rank_of(process) is not None:
                os.kill(process, signal.SIGKILL)

    def _end_late(self, now: float) -> None:
        """End stopped ranks, and ranks that have found none to join for EXIT_TIMEOUT."""
        late = {
            rank: process
            for rank, process in self._ranks.running().items()
            if (member := self._members[rank]).restarts and member.state is State.RUNNING and not member.joined
        }
        due = now >= self._check_at  # this is also called after every SIGCHLD
        any_watched = late or any(member.blocks_joiner for member in self._members.values())
        self._check_at = min(math.inf if due else self._check_at, now + CHECK_INTERVAL) if any_watched else math.inf
        if not late or self._any_registered():
            self._over_since = math.inf
            if due:
                self._end_stopped(late)
        else:
            self._over_since = min(self._over_since, now)
            if now >= self._over_since + EXIT_TIMEOUT:
                for rank, process in late.items():
                    self._end(rank, process, LATE)

    def _end_stopped(self, late: dict[int, int]) -> None:
        for rank, member in self._members.items():
            stopped = (rank in late or member.blocks_joiner) and self._is_stopped(rank, member)
            member.blocks_joiner = member.blocks_joiner and stopped
            member.stopped = member.stopped + 1 if stopped else 0
            if member.stopped == STOPPED_CHECKS:
                blocked = "was stopped while another rank waited for it, and was ended"
                self._end(rank, late.get(rank, member.process), "was stopped and ended" if rank in late else blocked)

    def cancel(self, reason: str = "") -> None:
        """Start nothing any more."""
        for rank, member in self._members.items():
            if member.move("is cancelled") and reason:
                self._report(f"rank {rank} is not restarted: {reason}")

    def _schedule(self, rank: int, text: str) -> None:
        member = self._members[rank]
        member.restarts += 1
        often = f"({member.restarts} of {self._limit})"
        if member.early:
            pause = min(FIRST_PAUSE * 2.0 ** (member.early - 1), LONGEST_PAUSE)
            self._report(f"{text} before it had joined; restarted in {pause:g} s {often}")
        else:
            pause = 0.0
            self._report(f"{text}; restarted {often}")
        member.move("is to be restarted", time.monotonic() + pause)

    def _end_left_out(self, which: int, process: int = 0) -> None:
        """End a rank that `shrink` has left out; or a process, if this is the launcher whose first rank is `which`."""
        if process:
            rank = self._ranks.rank_of(process) if which == self._place.first else None
        else:
            rank, process = which, self._members[which].process
            if not self._members[which].joined or self._ranks.rank_of(process) != rank:
                rank = None
        if rank is not None:  # each survivor says so
            what = "was stopped" if is_stopped(process) else "did not call shrink"
            self._end(rank, process, f"{what}, was left out by the others and ended")

    def _end(self, rank: int, process: int, reason: str) -> None:
        member = self._members[rank]
        if not member.move("is ended", time.monotonic() + EXIT_TIMEOUT):
            return
        member.process, member.reason, member.stopped, member.blocks_joiner = process, reason, 0, False
        with suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.kill(process, number)
