"""`ringcomm run --preload`: one process imports modules, and the ranks of this node are forked from it.

Imports take most of a start, and every rank would do the same: NumPy takes 50 ms of a core, torch more than a second,
and on a file server all ranks read at once.
"""

import builtins
import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from types import CodeType
from typing import IO, NamedTuple, Self

from ringcomm.config import LAUNCHER
from ringcomm.errors import ArgumentError, RingcommError, describe_error
from ringcomm.launcher.processes import START_CALLS, describe_exit
from ringcomm.machine import topology
from ringcomm.machine.threads import starting

__all__ = ["ForkedRank", "ImportingProcess", "serve"]

PR_SET_CHILD_SUBREAPER = 36  # Linux: orphans become children of this process
ENV_START, ENV_END = 49, 50  # in /proc/self/stat, counted from 0


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


class ImportingProcess:
    """The process that imports the modules, seen from the launcher."""

    def __init__(
        self, modules: Sequence[str], program: Sequence[str], environment: Mapping[str, str], group: int
    ) -> None:
        """`program`: a Python file, or -m and a module, with arguments; `group`: of processes."""
        self._name = f"the process that imports {', '.join(modules)} for the ranks"
        self._control, theirs = Pipe()
        # Without the current folder, where another ringcomm may lie.
        code = "import sys; sys.path[:] = filter(None, sys.path); from ringcomm.launcher.preload import serve; "
        code += f"exec(serve({theirs.fileno()}, {list(modules)}))"
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

    def fileno(self) -> int:
        """Return what can be read once the modules are imported, or the process has ended."""
        return self._control.fileno()

    @property
    def done(self) -> bool:
        return self._control.poll()

    def check(self) -> None:
        """Raise the error with which the import has ended, if any."""
        if self._answer() is None:
            raise RingcommError(f"{self._name} {describe_exit(self._process.wait())}")

    def close(self) -> None:
        """Wait for its end."""
        self._control.close()
        self._process.wait()

    def fork(self, how: "Fork", stdin: int) -> ForkedRank | None:
        """Start a rank, whose stdout and stderr are pipes; return None if the importing process has ended."""
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        try:
            with _adopting():
                with suppress(OSError):  # it has ended, which its answer tells
                    self._control.send(how)
                    for descriptor in (stdin, theirs_out, theirs_err):
                        reduction.send_handle(self._control, descriptor, self._process.pid)
                pid = self._answer()
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
        if pid is None:
            os.close(out)
            os.close(err)
            return None
        return ForkedRank(pid, open(out, "rb", buffering=0), open(err, "rb", buffering=0))

    def _answer(self) -> int | None:
        """Return the answer of the importing process, None if it has ended; raise the error that it tells."""
        try:
            answer: int | RingcommError = self._control.recv()
        except (EOFError, OSError):
            return None
        if isinstance(answer, RingcommError):
            raise answer
        return answer


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of orphans among its descendants in the body."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RingcommError("--preload needs a system that lets a process adopt others (PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Fork(NamedTuple):
    """What the importing process is told of a rank."""

    environment: dict[str, str]
    cores: Collection[int]
    mask: Collection[int]  # the signals that it blocks


# --- In the importing process -----------------------------------------------------------------------------------------


def serve(number: int, modules: Sequence[str]) -> CodeType | str:
    """Import the modules, then fork a rank at each request; return in a rank the code of its program.

    That replaces what is in `__main__`. Without a rank, at the end of the launcher, nothing is left to run.
    """
    control, program, before = Connection(number), sys.argv[1:], dict(os.environ)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0])))
    control.send(_import(modules))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # which is for the ranks: they have masks of their own
    gc.freeze()  # collections in the ranks then do not copy the pages of these objects
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(EOFError, OSError):  # the launcher has ended
        while True:
            how: Fork = control.recv()
            descriptors = [reduction.recv_handle(control) for _ in range(3)]
            try:
                rank = _fork()
            except RingcommError as error:
                control.send(error)
            else:
                if rank is None:
                    control.close()
                    _become_rank(how, before, descriptors)
                    return _main(program)
                control.send(rank)
            for descriptor in descriptors:
                os.close(descriptor)
    return ""


def _import(modules: Sequence[str]) -> ArgumentError | int:
    """Return 0, or why a module cannot be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything
            traceback.print_exc()
            return ArgumentError(f"--preload {module}: {describe_error(error)}")
        if "mpi4py.MPI" in sys.modules:
            return ArgumentError(f"--preload {module}: it imports mpi4py.MPI, which each rank has to do by itself")
    return 0


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


def _become_rank(how: Fork, before: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """`before`: the environment in which the importing process has started; the modules may have changed it."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update({name: value for name, value in how.environment.items() if before.get(name) != value})
    _show_environment({name: how.environment[name] for name in LAUNCHER if name in how.environment})
    if how.cores != topology.cores():  # else a sandbox may deny it
        os.sched_setaffinity(0, how.cores)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # otherwise all ranks draw the same numbers
    signal.pthread_sigmask(signal.SIG_SETMASK, how.mask)


def _show_environment(values: Mapping[str, str]) -> None:
    """Put these into /proc/self/environ, by which the launcher knows the processes that this one forks.

    The kernel shows there the memory in which it had put the environment of the importing process.
    """
    data = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in values.items())
    with suppress(OSError):  # without /proc nobody looks
        with open("/proc/self/stat") as file:
            facts = file.read().rpartition(")")[2].split()
        start, end = (int(facts[each - 2]) for each in (ENV_START, ENV_END))
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(data.ljust(end - start, b"\0")[: end - start])


def _main(program: Sequence[str]) -> CodeType:
    """Return the code of the program, and make `__main__` what it is where Python starts it."""
    module = sys.modules["__main__"]
    namespace = vars(module)
    namespace.clear()
    namespace.update(__name__="__main__", __doc__=None, __package__=None, __loader__=None, __spec__=None)
    namespace.update(__builtins__=builtins, __annotations__={})
    if program[0] == "-m":
        sys.argv = [*program[1:]]
        return compile(f"__import__('runpy')._run_module_as_main({program[1]!r})", "<preload>", "exec")
    sys.argv = [*program]
    try:
        with open(program[0], "rb") as file:
            text = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {program[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    namespace["__file__"] = os.path.abspath(program[0])
    return compile(text, namespace["__file__"], "exec")
