"""Watches the ranks of `ringcomm run`: forwards their output and signals, and ends them together."""

import math
import os
import selectors
import signal
import sys
import time
from typing import Self

from ringcomm.bootstrap.membership import TOO_LATE
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.errors import Aborted, PeerLost, RingcommError
from ringcomm.launcher import processes
from ringcomm.launcher.nodes import Nodes
from ringcomm.launcher.output import OutputWriter, RankOutput
from ringcomm.launcher.ranks import Ranks, RankStart
from ringcomm.launcher.restarts import Restarts
from ringcomm.launcher.signals import SignalSocket

__all__ = ["FORWARDED", "Supervisor"]

# Seconds after the failure of a rank, and the signal that the others then get: EXIT_TIMEOUT to exit by themselves, 2
# more to handle SIGTERM.
ESCALATION = ((processes.EXIT_TIMEOUT, signal.SIGTERM), (processes.EXIT_TIMEOUT + 2.0, signal.SIGKILL))
REPORT_STOPPED_AFTER = 5.0  # seconds
FORWARDED = (signal.SIGINT, signal.SIGTERM)
UNCAUGHT = 1  # the status with which Python exits after any exception, also one that the failure of another rank raised
CAUSE_TIMEOUT = 1.0  # seconds after such an exit in which another failure counts as the first


class Supervisor:
    """Starts the ranks, and waits for them. At the end of `with` they and their children are dead."""

    def __init__(self, signals: SignalSocket, nodes: Nodes | None, place: Place) -> None:
        """`place`: of any rank."""
        self._signals, self._nodes = signals, nodes
        self._ranks = Ranks(signals, *FORWARDED)
        self._stopped: dict[int, float] = {}  # when to report a stopped rank; infinity: that was done
        self._elastic = place.max_restarts is not None
        keepalive = nodes.keepalive if nodes else KEEPALIVE
        self._restarts = Restarts(place, keepalive, self._ranks, self.start, self._print)
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        self._out = OutputWriter(out, signals.wake)
        # Two threads that write to one pipe would mix their lines.
        self._err = self._out if os.path.sameopenfile(out, err) else OutputWriter(err, signals.wake)
        self._outputs = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()  # all but output
        for selector in (self._outputs, self._control):
            for source in (signals, nodes, self._restarts):
                if source:
                    selector.register(source, selectors.EVENT_READ)
        self._status = 0
        self._any_well = False  # a rank has ended with status 0
        self._forwarded = 0  # the last forwarded signal
        self._scheduled: list[tuple[float, signal.Signals]] = []
        self._uncaught: RingcommError | None = None  # a failure that another one may have caused
        self._uncaught_until = math.inf

    def __enter__(self) -> Self:
        self._ranks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.__exit__()
        self._restarts.close()
        self._outputs.close()
        self._control.close()
        for writer in {self._out, self._err}:
            writer.close()

    def import_modules(self, how: RankStart) -> bool:
        """Import the modules of all ranks; return whether the job goes on: a signal or another node may end it."""
        importing = self._ranks.start_import(how)
        self._control.register(importing, selectors.EVENT_READ)
        while not importing.done:  # as the ranks, it is given time to end, and then killed
            self._poll(self._control)
        self._control.unregister(importing)
        if self._forwarded or self._status:
            self._status = self._status or 128 + self._forwarded
            return False
        importing.check()
        return True

    def start(self, how: RankStart) -> None:
        process = self._ranks.start(how)
        for source, writer in ((process.stdout, self._out), (process.stderr, self._err)):
            assert source is not None
            self._outputs.register(source, selectors.EVENT_READ, RankOutput(how.rank, source, writer))

    def wait(self) -> int:
        """Forward the output of the ranks until all have exited, on all nodes; return the exit status."""
        while self._unfinished() or (self._uncaught and self._nodes and not self._nodes.over):
            self._poll(self._control if self._out.full or self._err.full else self._outputs)
        self._settle_uncaught()
        self._ranks.send(signal.SIGKILL)  # children of the ranks, so that all writers are gone
        for key in self._outputs.get_map().values():
            if key.data:
                while key.data.forward():
                    pass
        if self._nodes:
            self._nodes.end()
            while not self._nodes.over:
                self._poll(self._control)
        if not self._any_well:
            self._status = self._status or self._restarts.lost
        return self._status if self._flushed() else self._status or 128 + self._forwarded

    def _unfinished(self) -> bool:
        return bool(self._ranks.running() or self._restarts.pending)

    def _flushed(self) -> bool:
        """Wait until all output is written.

        After a signal, give up when the reader makes no progress for EXIT_TIMEOUT.
        """
        seen, limit = -1, math.inf
        while not (self._out.done and self._err.done):
            if (written := self._out.written + self._err.written) > seen or limit == math.inf:
                seen = written
                limit = time.monotonic() + ESCALATION[0][0] if self._forwarded else math.inf
            if time.monotonic() >= limit:
                return False
            self._poll(self._control, limit)
        return True

    def _poll(self, selector: selectors.BaseSelector, until: float = math.inf) -> None:
        """Wait for output, signals or the deadline, and handle them."""
        probe_due = self._nodes.due if self._nodes else math.inf
        scheduled = (when for when, _ in self._scheduled)
        until = min([until, self._uncaught_until, *self._stopped.values(), self._restarts.due, probe_due, *scheduled])
        for key, _ in selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
            if key.fileobj is self._signals:
                self._handle_signals()
            elif key.fileobj is self._nodes:
                self._read_nodes()
            elif key.fileobj is self._restarts:
                self._read_membership()
            elif key.data and not key.data.forward():  # none for modules that are imported
                self._outputs.unregister(key.fileobj)
                key.data.close()
        if self._nodes:
            self._nodes.probe()
        for writer in (self._out, self._err):
            writer.check()
        while self._scheduled and time.monotonic() >= self._scheduled[0][0]:
            self._ranks.send(self._scheduled.pop(0)[1])
        if time.monotonic() >= self._uncaught_until:
            self._settle_uncaught()
        if time.monotonic() >= min(self._stopped.values(), default=math.inf):
            self._report_stopped()
        if time.monotonic() >= self._restarts.due:
            self._restarts.poll()

    def _handle_signals(self) -> None:
        for number in self._signals.read():
            if number in FORWARDED:
                if self._nodes:
                    text = f"{self._nodes.name} was sent {signal.Signals(number).name}"
                    self._nodes.fail(Aborted(text, got=number))
                self._print(f"sent {signal.Signals(number).name} to the ranks")
                self._forward(number)
        ended_well = []
        # First those that ended by themselves: of theirs it follows that a rank came too late to join.
        for rank, code in sorted(self._ranks.reap(), key=lambda ended: ended[1] == TOO_LATE):
            if code or self._restarts.why_ended(rank):
                self._report(rank, code)
            else:
                self._any_well = True
                ended_well.append(rank)
                self._restarts.end_well(rank)
        if ended_well and ((self._nodes and not self._nodes.over) or self._unfinished()):
            with_processes = self._ranks.with_processes()
            self._restarts.tell_of_end(rank for rank in ended_well if rank not in with_processes)
        if text := self._ranks.reaper_loss():
            self._print(text)
        when = time.monotonic() + REPORT_STOPPED_AFTER
        self._stopped = {rank: self._stopped.get(rank, when) for rank in self._ranks.stopped()}
        self._restarts.poll()

    def _read_nodes(self) -> None:
        assert self._nodes
        failure = self._nodes.read()
        if self._nodes.over:
            for selector in (self._outputs, self._control):
                selector.unregister(self._nodes)
        if failure:
            self._record_failure(failure)

    def _read_membership(self) -> None:
        self._restarts.read()
        if self._restarts.over:
            for selector in (self._outputs, self._control):
                selector.unregister(self._restarts)

    def _report_stopped(self) -> None:
        """Name the stopped ranks, for which the others wait, each once."""
        found = [rank for rank, when in self._stopped.items() if when < math.inf]
        self._stopped.update(dict.fromkeys(found, math.inf))
        running = self._ranks.running()
        hint = "kill -CONT " + " ".join(str(running[rank]) for rank in found)
        self._print(f"{format_ranks(found)} {'is' if len(found) == 1 else 'are'} stopped; to continue: {hint}")

    def _report(self, rank: int, code: int) -> None:
        """Record that a rank of this node has failed, unless it is restarted or another one is the reason."""
        on = f" on {self._nodes.host}" if self._nodes else ""
        text = f"rank {rank}{on} {self._restarts.why_ended(rank) or processes.describe_exit(code)}"
        failure = PeerLost(text, rank=rank, got=code if code > 0 else 128 - code)
        if self._elastic and not self._forwarded:
            ending = self._status or self._uncaught
            if code == TOO_LATE if ending else self._restarts.restart_or_report(rank, failure, over=self._any_well):
                return
            if self._restarts.any_joined:
                got = self._restarts.lost or failure.got
                failure = PeerLost(f"{text}, and no rank is left that could continue", rank=rank, got=got)
        if code != UNCAUGHT:
            self._settle(failure)
        elif not self._uncaught:
            self._uncaught, self._uncaught_until = failure, time.monotonic() + CAUSE_TIMEOUT

    def _settle_uncaught(self) -> None:
        if self._uncaught:
            self._settle(self._uncaught)
        self._uncaught, self._uncaught_until = None, math.inf

    def _settle(self, failure: RingcommError) -> None:
        if self._nodes and not self._nodes.over and not self._forwarded:
            self._nodes.fail(failure)
        else:
            self._record_failure(failure)

    def _record_failure(self, failure: RingcommError) -> None:
        if isinstance(failure, Aborted) and failure.got:  # a signal to one of the launchers
            if not self._forwarded:
                self._print(failure)
                self._forward(failure.got)
            if not self._ranks.running():
                self._status = self._status or 128 + failure.got
        elif self._status == 0:
            self._status = failure.got or 1
            if not self._forwarded or self._status != 128 + self._forwarded:  # else a signal that all ranks were sent
                self._print(failure)
            # Where no rank has joined yet, the others wait for one that never comes.
            self._schedule_signals(ESCALATION[0][0] if self._elastic and not self._restarts.any_joined else 0.0)

    def _print(self, failure: RingcommError | str) -> None:
        self._err.write(f"ringcomm run: {failure}\n".encode())

    def _forward(self, number: int) -> None:
        self._forwarded = number
        self._ranks.send(signal.Signals(number))
        self._schedule_signals()

    def _schedule_signals(self, earlier: float = 0.0) -> None:
        """The job ends; `earlier`: by so many seconds than the ESCALATION."""
        self._restarts.cancel()
        if not self._scheduled:
            start = time.monotonic() - earlier
            self._scheduled = [(start + seconds, number) for seconds, number in ESCALATION]
