"""`ringcomm run`: a program on several ranks of this machine, with their output line by line and an end for all.

The ranks are one process group. A guard leads it: a small process that waits for the end of `ringcomm run`, and then
kills the group, and the ranks that have left it. So nothing stays behind even if `ringcomm run` itself is killed,
whatever program the ranks run.
"""

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
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from ringcomm import processes
from ringcomm.errors import ArgumentError, refuse
from ringcomm.output import Lines, Printer
from ringcomm.place import Place

__all__ = ["run"]

# What the others get when a rank has failed, and after how many seconds: GRACE to end by themselves, then as long to
# handle SIGTERM as they have to end when `ringcomm run` is killed.
LAST_SIGNALS = ((processes.GRACE, signal.SIGTERM), (processes.GRACE + 2.0, signal.SIGKILL))
FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run(command: Sequence[str], size: int) -> int:
    """Run `command` on `size` ranks: a Python file, `-m` and a module, or an executable, each with its arguments.

    Returns the exit status of the rank that failed first, 128 + the signal for one that was killed, else 0. SIGINT and
    SIGTERM are passed on to the ranks. Must be called on the main thread.
    """
    if not 1 <= size <= processes.MOST_RANKS:
        raise refuse("number of ranks", f"1 to {processes.MOST_RANKS}", size)
    program = _program(command)
    job, nonce = secrets.token_hex(16), secrets.token_hex(16)
    with _Wakeups(signal.SIGCHLD, *FORWARDED) as wakeups, _Ranks(wakeups) as ranks:
        for rank in range(size):
            ranks.start(program, Place(rank, size, job, nonce))
        return ranks.wait()


def _program(command: Sequence[str]) -> list[str]:
    first = command[0]
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *command]
    if shutil.which(first) is None:
        raise ArgumentError(f"{first!r} is not an executable; Python programs end with .py, or are modules after -m")
    return list(command)


class _Wakeups:
    """A socket that can be read when a signal has come, or another thread has called `wake`."""

    def __init__(self, *signals: signal.Signals) -> None:
        self.came: list[int] = []
        self._signals = signals

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        # What has come is noted apart: of many bytes, some may find no room.
        self._before = {number: signal.signal(number, lambda it, _: self.came.append(it)) for number in self._signals}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # it can be read as it is, or is closed
            self._sender.send(b"\0")

    def read(self) -> list[int]:
        """Return the signals that have come since the last time."""
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        came, self.came = self.came, []
        return came


class _Ranks:
    """The processes of all ranks. After `with`, neither they nor what they have started in their group is left."""

    def __init__(self, wakeups: _Wakeups) -> None:
        self._wakeups = wakeups
        self._processes: list[subprocess.Popen[bytes]] = []
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
        self._out = Printer(out, wakeups.wake)
        # Of one pipe two threads would write into each other's lines.
        self._err = self._out if os.path.sameopenfile(out, err) else Printer(err, wakeups.wake)
        self._outputs = selectors.DefaultSelector()
        self._outputs.register(wakeups, selectors.EVENT_READ)
        self._no_outputs = selectors.DefaultSelector()
        self._no_outputs.register(wakeups, selectors.EVENT_READ)
        self._status = 0
        self._forwarded = 0  # the last signal that was passed on
        self._last_signals: list[tuple[float, signal.Signals]] = []

    def __enter__(self) -> Self:
        # What is passed on reaches the whole group, but nothing less than SIGKILL may end the guard.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", processes.__file__], stdin=subprocess.PIPE, bufsize=0, process_group=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in (*self._processes, self._guard):
            with process:  # closes its pipes and reaps it
                pass
        self._outputs.close()
        self._no_outputs.close()
        for printer in {self._out, self._err}:
            printer.close()

    def start(self, program: Sequence[str], place: Place) -> None:
        # Without PYTHONUNBUFFERED, output to a pipe would come late, and not at all from a rank that is killed.
        environment = {"PYTHONUNBUFFERED": "1", **place.environment()}
        process = subprocess.Popen(
            program,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=self._guard.pid,
        )
        self._processes.append(process)
        self._tell_guard(process)
        for source, printer in ((process.stdout, self._out), (process.stderr, self._err)):
            assert source is not None
            self._outputs.register(source, selectors.EVENT_READ, Lines(place.rank, source, printer))

    def wait(self) -> int:
        """Print what the ranks print until all have ended."""
        while any(process.returncode is None for process in self._processes):
            self._look(self._no_outputs if self._out.full or self._err.full else self._outputs)
        self._send(signal.SIGKILL)  # what the ranks have left behind, so that nobody writes any more
        for key in self._outputs.get_map().values():
            if key.data:
                while key.data.print():
                    pass
        return self._status if self._printed() else self._status or 128 + self._forwarded

    def _printed(self) -> bool:
        """Wait until all is printed. After a signal, give up when nothing was read for a while."""
        seen, limit = -1, math.inf
        while not (self._out.done and self._err.done):
            if (printed := self._out.printed + self._err.printed) > seen or limit == math.inf:
                seen = printed
                limit = time.monotonic() + LAST_SIGNALS[0][0] if self._forwarded else math.inf
            if time.monotonic() >= limit:
                return False
            self._look(self._no_outputs, limit)
        return True

    def _look(self, selector: selectors.BaseSelector, until: float = math.inf) -> None:
        """Wait until something happens, and attend to it."""
        until = min([until, *(when for when, _ in self._last_signals)])
        for key, _ in selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
            if key.fileobj is self._wakeups:
                self._attend()
            elif not key.data.print():
                self._outputs.unregister(key.fileobj)
        for printer in (self._out, self._err):
            printer.check()
        while self._last_signals and time.monotonic() >= self._last_signals[0][0]:
            self._send(self._last_signals.pop(0)[1])

    def _attend(self) -> None:
        for number in self._wakeups.read():
            if number in FORWARDED:
                self._forwarded = number
                self._send(signal.Signals(number))
                self._set_last_signals()
        for rank, process in enumerate(self._processes):
            if process.returncode is None and (code := process.poll()) is not None:
                self._tell_guard(process)
                if code:
                    self._failed(rank, code)

    def _failed(self, rank: int, code: int) -> None:
        if self._status == 0:
            self._status = code if code > 0 else 128 - code
            self._err.print(f"ringcomm run: rank {rank} {processes.ending(code)}\n".encode())
            self._set_last_signals()

    def _set_last_signals(self) -> None:
        if not self._last_signals:
            now = time.monotonic()
            self._last_signals = [(now + seconds, number) for seconds, number in LAST_SIGNALS]

    def _send(self, number: signal.Signals) -> None:
        running = [process.pid for process in self._processes if process.returncode is None]
        processes.send(number, self._guard.pid, running)

    def _tell_guard(self, process: "subprocess.Popen[bytes]") -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):  # it is killed last of all, with the group
            self._guard.stdin.write(b"%d\n" % process.pid)
