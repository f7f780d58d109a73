"""`ringcomm run --preload`: one process imports modules, and the ranks of this node are forked from it.

Imports take most of a start, and every rank would do the same: NumPy takes 50 ms of a core, torch more than a second,
and on a file server all ranks read at once.
"""

import ctypes
import gc
import importlib
import os
import pickle
import runpy
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import IO, Self

from ringcomm.config import LAUNCHER
from ringcomm.errors import ArgumentError, RingcommError, describe_error
from ringcomm.launcher.processes import START_CALLS, describe_exit
from ringcomm.launcher.signals import SignalSocket
from ringcomm.machine import topology
from ringcomm.machine.threads import starting

__all__ = ["ForkedRank", "Preload", "serve"]

PR_SET_CHILD_SUBREAPER = 36  # Linux: orphans become children of this process
CHECK_INTERVAL = 0.2  # seconds between looks at signals while modules are imported


class ForkedRank:
    """A rank that this process has not started but adopted; in the manner of subprocess.Popen."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.poll(0)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Preload:
    """The process that imports the modules."""

    def __init__(
        self, modules: Sequence[str], program: Sequence[str], environment: Mapping[str, str], group: int
    ) -> None:
        """`program`: a Python file, or -m and a module, with arguments; `group`: of processes."""
        self._name = f"the process that imports {', '.join(modules)} for the ranks"
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._control, theirs = Pipe()
        # Without the current folder, where another ringcomm may lie.
        code = "import sys; sys.path[:] = filter(None, sys.path); from ringcomm.launcher.preload import serve; "
        code += f"serve({theirs.fileno()}, {list(modules)})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *program],
            env={name: value for name, value in environment.items() if name not in LAUNCHER},
            stdin=subprocess.DEVNULL,
            stdout=1,  # also where cli.py has opened it, which would else be closed
            stderr=2,
            pass_fds=[theirs.fileno()],
            process_group=group,
        )
        theirs.close()

    def close(self) -> None:
        """Wait for its end."""
        self._control.close()
        self._process.wait()

    def fork(
        self, environment: Mapping[str, str], cores: Collection[int], stdin: int, signals: SignalSocket
    ) -> ForkedRank:
        """Start a rank. Raises ArgumentError if a module cannot be imported, SystemExit at a signal meanwhile."""
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        try:
            self._control.send((dict(environment), cores, signals.mask))
            for descriptor in (stdin, theirs_out, theirs_err):
                reduction.send_handle(self._control, descriptor, self._process.pid)
            while not self._control.poll(CHECK_INTERVAL):
                if sent := [number for number in signals.pending if number != signal.SIGCHLD]:
                    raise SystemExit(128 + sent[0])
            answer = self._control.recv()
        except (EOFError, OSError):
            raise RingcommError(f"{self._name} {describe_exit(self._process.wait())}") from None
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
        if isinstance(answer, RingcommError):
            raise answer
        return ForkedRank(answer, open(out, "rb", buffering=0), open(err, "rb", buffering=0))


def serve(number: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a rank at each request; return in a rank when its program has ended."""
    control, program = Connection(number), sys.argv[1:]
    first = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))
    sys.path.insert(0, first)
    failure = _import(modules)
    gc.freeze()  # collections in the ranks then do not copy the pages of these objects
    while request := _receive(control):
        environment, cores, mask, descriptors = request
        try:
            if failure:
                raise failure
            rank = _fork()
            if rank is None:
                control.close()
                _become_rank(environment, cores, mask, descriptors)
                _run(program)
                return
            control.send(rank)
        except RingcommError as error:
            control.send(error)
        for descriptor in descriptors:
            os.close(descriptor)


def _import(modules: Sequence[str]) -> ArgumentError | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything
            return ArgumentError(f"--preload {module}: {describe_error(error)}")
    return None


def _receive(control: Connection) -> tuple[dict[str, str], Collection[int], Collection[int], list[int]] | None:
    """Return the next request; None when the launcher has closed the connection."""
    try:
        environment, cores, mask = control.recv()
        return environment, cores, mask, [reduction.recv_handle(control) for _ in range(3)]
    except (EOFError, OSError):
        return None


def _fork() -> int | None:
    """Fork a rank that becomes a child of the launcher, since its parent ends; return its id here, None in the rank."""
    reader, writer = os.pipe()
    with starting("a rank", START_CALLS):
        between = os.fork()
    if between:
        os.close(writer)
        os.waitpid(between, 0)
        with open(reader, "rb") as answer:
            rank: int | RingcommError = pickle.load(answer)
        if isinstance(rank, RingcommError):
            raise rank
        return rank
    try:
        with starting("a rank", START_CALLS):
            rank = os.fork()
    except RingcommError as error:
        rank = error
    if rank != 0:
        os.write(writer, pickle.dumps(rank))
        os._exit(0)
    os.close(reader)
    os.close(writer)
    return None


def _become_rank(
    environment: Mapping[str, str], cores: Collection[int], mask: Collection[int], descriptors: Sequence[int]
) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if cores != topology.cores():  # else a sandbox may deny it
        os.sched_setaffinity(0, cores)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # otherwise all ranks draw the same numbers
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(program: Sequence[str]) -> None:
    """Run the program as Python runs its main program."""
    if program[0] == "-m":
        sys.argv = [*program[1:]]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*program]
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")
