"""`ringcomm run`: run a program on several ranks of this machine, forward its output, and end all ranks together.

On several machines one of these runs on each; nodes.py connects them.

The ranks form one process group. Its leader, the reaper, is a small process that waits until `ringcomm run` exits and
then kills the group and the ranks that have left it. So no process survives even if `ringcomm run` itself is killed.
"""

import logging
import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from ringcomm.bootstrap.joining import any_present
from ringcomm.bootstrap.place import RESTARTS, Place
from ringcomm.errors import Aborted, ArgumentError, PeerLost, RingcommError, refuse
from ringcomm.launcher import processes
from ringcomm.launcher.nodes import NodeOptions, Nodes, join_nodes
from ringcomm.launcher.output import OutputWriter, RankOutput
from ringcomm.machine import descriptors, topology
from ringcomm.machine.threads import starting

__all__ = ["run"]

log = logging.getLogger("ringcomm")

# Seconds after the failure of a rank, and the signal that the others then get: EXIT_TIMEOUT to exit by themselves, 2
# more to handle SIGTERM.
ESCALATION = ((processes.EXIT_TIMEOUT, signal.SIGTERM), (processes.EXIT_TIMEOUT + 2.0, signal.SIGKILL))
FORWARDED = (signal.SIGINT, signal.SIGTERM)
MPI4PY = Path(__file__).parents[1] / "mpi4py" / "shim"  # has a package mpi4py
UNCAUGHT = 1  # the status with which Python exits after any exception, also one that the failure of another rank raised
CAUSE_TIMEOUT = 1.0  # seconds after such an exit in which another failure counts as the first


def run(
    command: Sequence[str],
    size: int,
    options: NodeOptions | None = None,
    bind: bool | None = None,
    mpi4py: bool = False,
    respawn: int | None = None,
) -> int:
    """Run `command` on `size` ranks: a Python file, `-m` and a module, or an executable, each with its arguments.

    With `options` they are the ranks of this node, together with those that other launchers start on theirs. Each rank
    is bound to cores of its own if there are enough; with `bind` there have to be, and with False no rank is bound.
    With `mpi4py`, `import mpi4py` gives ringcomm.mpi4py in the ranks and in the processes that they start.
    With `respawn`, a rank that fails is started again, so many times at most, and the others go on: they shrink and
    grow their communicator.

    Returns the exit status of the rank that failed first (128 + the signal if it was killed), else 0; 1 if a node was
    lost. With `respawn` it is 0 if any rank has ended well. A status of 1 counts as later by CAUSE_TIMEOUT. Forwards
    SIGINT and SIGTERM to the ranks. Must be called on the main thread.
    """
    if not 1 <= size <= processes.MAX_RANKS:
        raise refuse("number of ranks", f"1 to {processes.MAX_RANKS}", size)
    shares = _shares(size, bind)
    with join_nodes(options, size) if options else nullcontext() as nodes:
        program = _program(command)
        descriptors.provide_for_launcher(size)
        first = nodes.first if nodes else Place(0, size, secrets.token_hex(16), secrets.token_hex(16))
        first = replace(first, restarts=None if respawn is None else 0)
        with (
            _SignalSocket(signal.SIGCHLD, *FORWARDED) as signals,
            _Supervisor(signals, nodes, first, respawn) as supervisor,
        ):
            for local_rank, cores in enumerate(shares):
                place = replace(first, rank=first.rank + local_rank)
                # Without PYTHONUNBUFFERED, output to a pipe is late, and lost if the rank is killed.
                environment = {"PYTHONUNBUFFERED": "1", **place.environment()}
                if mpi4py:
                    _put_first(MPI4PY, environment)
                supervisor.start(program, place.rank, environment, cores)
            return supervisor.wait()


def _shares(size: int, bind: bool | None) -> list[set[int]]:
    """Return the cores of each rank."""
    cores = topology.cores()
    if bind is not False and not topology.outnumbered([cores] * size):
        return topology.shares(cores, size)
    if bind:
        raise refuse("--bind core", f"at most as many ranks as cores ({topology.describe()})", f"{size} ranks")
    log.info("%d ranks are not bound to cores (%s)", size, topology.describe())
    return [cores] * size


def _put_first(folder: Path, environment: dict[str, str]) -> None:
    """Make Python look for modules in this folder before all others of PYTHONPATH and of its installation."""
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))


def _program(command: Sequence[str]) -> list[str]:
    first = command[0]
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *command]
    if shutil.which(first) is None:
        raise ArgumentError(f"{first!r} is not an executable; a Python program ends with .py, or is a module after -m")
    return list(command)


class _SignalSocket:
    """A socket that becomes readable when a signal arrives, or another thread calls `wake`."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._received: list[int] = []
        self._signals = signals

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        # A full socket drops bytes, so the handlers record the signals too.
        self._before = {each: signal.signal(each, lambda it, _: self._received.append(it)) for each in self._signals}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)  # a parent may block them
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # it is full, hence readable, or closed
            self._sender.send(b"\0")

    @contextmanager
    def mask_for_children(self, *blocked: signal.Signals) -> Iterator[None]:
        """Block what was blocked before, and `blocked`, in the body: the processes that it starts inherit that."""
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, {*self._mask, *blocked})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def read(self) -> list[int]:
        """Return the signals received since the last call."""
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        received, self._received = self._received, []
        return received


@contextmanager
def _bound_to(cores: set[int]) -> Iterator[None]:
    """Bind this thread in the body: the processes that it starts inherit that."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Supervisor:
    """Starts the ranks, forwards their output and signals. At the end of `with` they and their children are dead."""

    def __init__(self, signals: _SignalSocket, nodes: Nodes | None, place: Place, respawn: int | None) -> None:
        self._signals, self._nodes, self._place, self._respawn = signals, nodes, place, respawn
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._replaced: list[subprocess.Popen[bytes]] = []
        self._starts: dict[int, Callable[[Mapping[str, str]], None]] = {}  # each starts a rank with more environment
        self._restarts: Counter[int] = Counter()
        self._lost = 0  # the status of the first rank that was lost for good
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        self._out = OutputWriter(out, signals.wake)
        # Two threads that write to one pipe would mix their lines.
        self._err = self._out if os.path.sameopenfile(out, err) else OutputWriter(err, signals.wake)
        self._outputs = selectors.DefaultSelector()
        self._control = selectors.DefaultSelector()  # signals and the other nodes, but no output
        for selector in (self._outputs, self._control):
            for source in (signals, nodes) if nodes else (signals,):
                selector.register(source, selectors.EVENT_READ)
        self._status = 0
        self._forwarded = 0  # the last forwarded signal
        self._scheduled: list[tuple[float, signal.Signals]] = []
        self._uncaught: RingcommError | None = None  # a failure that another one may have caused
        self._uncaught_until = math.inf

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", "-S", processes.__file__]
        # Forwarded signals reach the whole group; the reaper must survive all but SIGKILL.
        with starting("the process that ends the ranks"), self._signals.mask_for_children(*FORWARDED):
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in (*self._processes.values(), *self._replaced, self._reaper):
            with process:  # closes its pipes and reaps it
                pass
        self._outputs.close()
        self._control.close()
        for writer in {self._out, self._err}:
            writer.close()

    def start(self, program: Sequence[str], rank: int, environment: Mapping[str, str], cores: set[int]) -> None:
        log.info("rank %d runs on the cores %s", rank, ", ".join(map(str, sorted(cores))))
        with starting(f"rank {rank}"), self._signals.mask_for_children(), _bound_to(cores):
            process = subprocess.Popen(
                program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=self._reaper.pid,
            )
        self._processes[rank] = process
        self._starts[rank] = lambda more: self.start(program, rank, {**environment, **more}, cores)
        self._notify_reaper(process)
        for source, writer in ((process.stdout, self._out), (process.stderr, self._err)):
            assert source is not None
            self._outputs.register(source, selectors.EVENT_READ, RankOutput(rank, source, writer))

    def wait(self) -> int:
        """Forward the output of the ranks until all have exited, on all nodes; return the exit status."""
        while self._running() or (self._uncaught and self._nodes and not self._nodes.over):
            self._poll(self._control if self._out.full or self._err.full else self._outputs)
        self._settle_uncaught()
        self._send(signal.SIGKILL)  # children of the ranks, so that all writers are gone
        for key in self._outputs.get_map().values():
            if key.data:
                while key.data.forward():
                    pass
        if self._nodes:
            self._nodes.end()
            while not self._nodes.over:
                self._poll(self._control)
        if all(process.returncode for process in self._processes.values()):
            self._status = self._status or self._lost
        return self._status if self._flushed() else self._status or 128 + self._forwarded

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
        until = min([until, self._uncaught_until, *(when for when, _ in self._scheduled)])
        for key, _ in selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
            if key.fileobj is self._signals:
                self._handle_signals()
            elif key.fileobj is self._nodes:
                self._read_nodes()
            elif not key.data.forward():
                self._outputs.unregister(key.fileobj)
                key.data.close()
        for writer in (self._out, self._err):
            writer.check()
        while self._scheduled and time.monotonic() >= self._scheduled[0][0]:
            self._send(self._scheduled.pop(0)[1])
        if time.monotonic() >= self._uncaught_until:
            self._settle_uncaught()

    def _handle_signals(self) -> None:
        for number in self._signals.read():
            if number in FORWARDED:
                if self._nodes:
                    text = f"{self._nodes.name} was sent {signal.Signals(number).name}"
                    self._nodes.fail(Aborted(text, got=number))
                self._print(f"sent {signal.Signals(number).name} to the ranks")
                self._forward(number)
        for rank, process in [*self._processes.items()]:
            if process.returncode is None and (code := process.poll()) is not None:
                self._notify_reaper(process)
                if code:
                    self._report(rank, code)

    def _read_nodes(self) -> None:
        assert self._nodes
        failure = self._nodes.read()
        if self._nodes.over:
            for selector in (self._outputs, self._control):
                selector.unregister(self._nodes)
        if failure:
            self._record_failure(failure)

    def _report(self, rank: int, code: int) -> None:
        """Record that a rank of this node has failed, unless another one is the reason."""
        on = f" on {self._nodes.host}" if self._nodes else ""
        text = f"rank {rank}{on} {processes.describe_exit(code)}"
        failure = PeerLost(text, rank=rank, got=code if code > 0 else 128 - code)
        over = any(process.returncode == 0 for process in self._processes.values())
        if self._respawn is not None and not self._forwarded and (over or any_present(self._place)):
            self._replace(rank, failure)
        elif code != UNCAUGHT:
            self._settle(failure)
        elif not self._uncaught:
            self._uncaught, self._uncaught_until = failure, time.monotonic() + CAUSE_TIMEOUT

    def _replace(self, rank: int, failure: RingcommError) -> None:
        """Start a rank again that has failed, unless that has been done often enough."""
        if self._restarts[rank] == self._respawn or not any_present(self._place):
            self._lost = self._lost or failure.got
            self._print(f"{failure}; the others go on without it")
            return
        self._restarts[rank] += 1
        self._print(f"{failure}; started again ({self._restarts[rank]} of {self._respawn})")
        self._replaced.append(self._processes[rank])
        self._starts[rank]({RESTARTS: str(self._restarts[rank])})

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
            if not self._running():
                self._status = self._status or 128 + failure.got
        elif self._status == 0:
            self._status = failure.got or 1
            if not self._forwarded or self._status != 128 + self._forwarded:  # else a signal that all ranks were sent
                self._print(failure)
            self._schedule_signals()

    def _print(self, failure: RingcommError | str) -> None:
        self._err.write(f"ringcomm run: {failure}\n".encode())

    def _forward(self, number: int) -> None:
        self._forwarded = number
        self._send(signal.Signals(number))
        self._schedule_signals()

    def _running(self) -> list[int]:
        """Return the ids of the ranks of this node that run."""
        return [process.pid for process in self._processes.values() if process.returncode is None]

    def _schedule_signals(self) -> None:
        if not self._scheduled:
            now = time.monotonic()
            self._scheduled = [(now + seconds, number) for seconds, number in ESCALATION]

    def _send(self, number: signal.Signals) -> None:
        processes.send_signal(number, self._reaper.pid, self._running())

    def _notify_reaper(self, process: "subprocess.Popen[bytes]") -> None:
        assert self._reaper.stdin is not None
        with suppress(BrokenPipeError):  # it is killed with the group at the end
            self._reaper.stdin.write(b"%d\n" % process.pid)
