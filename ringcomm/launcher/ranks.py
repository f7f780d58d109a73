"""The processes of the ranks of one launcher.

They form one process group. Its leader, the reaper, is a small process that waits until `ringcomm run` exits and then
kills the group and the ranks that have left it. So no process survives even if `ringcomm run` itself is killed.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from ringcomm.bootstrap.place import RANK, RESTARTS, SECRET, environment_of
from ringcomm.launcher import processes
from ringcomm.launcher.input import RankInput
from ringcomm.launcher.processes import START_CALLS, describe_exit
from ringcomm.launcher.signals import SignalSocket
from ringcomm.machine import topology
from ringcomm.machine.threads import starting

if TYPE_CHECKING:  # --preload imports what it takes
    from ringcomm.launcher.preload import ForkedRank, ImportingProcess

__all__ = ["RankStart", "Ranks"]

log = logging.getLogger("ringcomm")

IDENTITY = SECRET, RANK, RESTARTS  # variables by which a process of a rank that may be restarted is known
REAPER = "the process that ends the ranks"
KILL_TIMEOUT = 1.0  # seconds for the kernel to end what was killed

RankProcess: TypeAlias = "subprocess.Popen[bytes] | ForkedRank"


@dataclass(frozen=True, slots=True)
class RankStart:
    """How a rank is started: by `command`, or by fork from a process that has imported `modules`, if there are any."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: set[int]
    modules: Sequence[str] = ()


class Ranks:
    """Starts, signals and reaps the ranks. At the end of `with` they and their children are dead."""

    def __init__(self, signals: SignalSocket, *forwarded: signal.Signals) -> None:
        """`forwarded`: the signals that are sent on to the ranks."""
        self._signals, self._forwarded = signals, forwarded
        self._processes: dict[int, RankProcess] = {}  # by rank
        self._starts: dict[int, RankStart] = {}
        self._replaced: list[RankProcess] = []
        self._importing: ImportingProcess | None = None
        self._input = RankInput()
        self._reaper_ended = False

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", "-S", processes.__file__]
        # Forwarded signals reach the whole group; the reaper must survive all but SIGKILL.
        with starting(REAPER, START_CALLS), self._signals.mask_for_children(*self._forwarded):
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for process in (*self._processes.values(), *self._replaced, self._reaper):
            with process:  # closes its pipes and reaps it
                pass
        if self._importing:
            self._importing.close()
        self._input.close()

    def start(self, how: RankStart) -> RankProcess:
        """Start a rank; its stdout and stderr are pipes. Rank 0 reads the standard input, the others an empty one."""
        rank, cores = how.rank, how.cores
        log.info("rank %d runs on the cores %s", rank, ", ".join(map(str, sorted(cores))))
        with starting(f"rank {rank}", START_CALLS), open(os.devnull) as empty:
            stdin = self._input.descriptor() if rank == 0 else empty.fileno()
            # If the importing process has died since, a restarted rank imports all by itself.
            process = self._forked(how, stdin) or self._executed(how, stdin)
        if rank in self._processes:
            self._replaced.append(self._processes[rank])
        self._processes[rank], self._starts[rank] = process, how
        self._notify_reaper(process)
        return process

    def _executed(self, how: RankStart, stdin: int) -> RankProcess:
        with self._signals.mask_for_children(), _bound_to(how.cores):
            return subprocess.Popen(
                how.command,
                env=how.environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=self.group,
            )

    def _forked(self, how: RankStart, stdin: int) -> "ForkedRank | None":
        if not self._importing:
            return None
        from ringcomm.launcher.preload import Fork

        return self._importing.fork(Fork(dict(how.environment), how.cores, self._signals.mask), stdin)

    def start_import(self, how: RankStart) -> "ImportingProcess":
        """Start the process that imports the modules, and from which the ranks are then forked."""
        from ringcomm.launcher.preload import ImportingProcess

        # The cores of a rank, by which some modules choose how many threads they start.
        with starting("the process that imports", START_CALLS), self._signals.mask_for_children(), _bound_to(how.cores):
            self._importing = ImportingProcess(how.modules, how.command[1:], how.environment, self.group)
        return self._importing

    @property
    def group(self) -> int:
        """The process group of the ranks, and of their children that have not left it."""
        return self._reaper.pid

    def started(self, rank: int) -> RankStart:
        """Return how a rank was started."""
        return self._starts[rank]

    def running(self) -> dict[int, int]:
        """Return the process id of each rank that has not been reaped."""
        return {rank: process.pid for rank, process in self._processes.items() if process.returncode is None}

    def processes_of(self, rank: int) -> list[int]:
        """Return the processes of a rank, which may have been started as the child of a script."""
        return [process for process, of in self._ranks_of(self._in_group()).items() if of == rank]

    def with_processes(self) -> set[int]:
        """Return the ranks of which any process runs, such as the child of a script that has ended."""
        return {*self._ranks_of(self._in_group()).values()}

    def rank_of(self, process: int) -> int | None:
        """Return which rank this process is; None if it is none, or was started before.

        It may be the child of a script that was started: then its environment tells.
        """
        return self._ranks_of([process]).get(process)

    def _ranks_of(self, processes: Iterable[int]) -> dict[int, int]:
        """Return the rank of each of these processes that has one: see rank_of."""
        started = {process: rank for rank, process in self.running().items()}
        by_identity = {_identity(how.environment): rank for rank, how in self._starts.items()}
        ranks = {}
        for process in processes:
            rank = started.get(process)
            if rank is None:
                with suppress(OSError):  # it has ended
                    rank = by_identity.get(_identity(environment_of(process)))
            if rank is not None:
                ranks[process] = rank
        return ranks

    def _in_group(self) -> list[int]:
        """Return the processes of the group; none where there is no /proc."""
        with suppress(FileNotFoundError):
            processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
            return [process for process in processes if _group_of(process) == self.group]
        return []

    def kill_rest(self, rank: int) -> None:
        """Kill what still runs of a rank that has ended: if that was a script, the rank itself may not have noticed."""
        rest = self.processes_of(rank)
        for process in rest:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        end = time.monotonic() + KILL_TIMEOUT  # until it cannot call `grow` any more
        while rest and time.monotonic() < end:
            time.sleep(0.01)
            rest = self.processes_of(rank)

    def reap(self) -> list[tuple[int, int]]:
        """Return rank and exit status of each rank that has ended since the last call; -N: killed by signal N."""
        ended = []
        for rank, process in self._processes.items():
            if process.returncode is None and (status := process.poll()) is not None:
                self._notify_reaper(process)
                ended.append((rank, status))
        return ended

    def reaper_loss(self) -> str:
        """Describe, once, how the reaper has ended, unless `send` has killed it; "" while it runs."""
        if self._reaper_ended:
            return ""
        # It is not reaped: as long as it is a zombie, its group exists.
        ended = os.waitid(os.P_PID, self._reaper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return ""
        self._reaper_ended = True
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return f"{REAPER} {describe_exit(status)}: they will not end if ringcomm run is killed"

    def stopped(self) -> list[int]:
        """Return the ranks whose processes a signal has stopped, and no debugger."""
        return [rank for rank, pid in self.running().items() if _stopped(pid)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks and their children."""
        self._reaper_ended |= number == signal.SIGKILL
        processes.send_signal(number, self._reaper.pid, self.running().values())

    def _notify_reaper(self, process: RankProcess) -> None:
        assert self._reaper.stdin is not None
        with suppress(BrokenPipeError):  # it is killed with the group at the end
            self._reaper.stdin.write(b"%d\n" % process.pid)


def _identity(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(map(environment.get, IDENTITY))


def _group_of(process: int) -> int:
    try:
        return os.getpgid(process)
    except OSError:  # it has ended
        return -1


def _stopped(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


@contextmanager
def _bound_to(cores: set[int]) -> Iterator[None]:
    """Bind this thread in the body: the processes that it starts inherit that."""
    before = topology.cores()
    if cores == before:  # also where a sandbox denies to bind
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
