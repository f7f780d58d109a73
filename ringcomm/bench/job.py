"""The ranks of one library and the requests to them. They sleep while another library is measured."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ringcomm.bench.interrupts import deferred_signals
from ringcomm.bench.peers import LibrarySpec

__all__ = ["START_TIMEOUT", "Job", "JobFailed", "Unsupported", "answers_of", "failure_reason", "started"]

PACKAGE = Path(__file__).parent / "rank"
ALIAS = "ringcomm_bench_rank"  # its name in environments without ringcomm
PR_SET_PDEATHSIG = 1
START_TIMEOUT = 60.0  # seconds for all ranks to import their library and connect
EXIT_TIMEOUT = 5.0  # seconds for a launcher to end by itself
MOST_CHARACTERS = 200  # of a reason
REASONS = (  # patterns of the line that explains a failure, the best first
    r"(\[\d+\] )?((\w+\.)+[A-Z]\w*|\w+(Error|Exception)): ",  # the last line of a traceback
    r".*(killed by|signal \d)",  # a launcher, about a rank that was killed
    r".*\w",
)


class JobFailed(Exception):
    """The ranks of a library crashed, hung or failed. The job has been killed."""


class Unsupported(Exception):
    """All ranks of a library rejected the request. The job continues with other requests."""


@contextmanager
def started(library: LibrarySpec, ranks: int, timeout: float, *request: Any) -> "Iterator[Job]":
    """Start a job in a folder of its own; kill it at the end of the block."""
    with TemporaryDirectory(prefix="ringcomm-bench-", ignore_cleanup_errors=True) as folder:
        job = Job(library, ranks, Path(folder), timeout, *request)
        try:
            yield job
        finally:
            job.kill()


class Job:
    """All ranks of one library."""

    def __init__(self, library: LibrarySpec, ranks: int, folder: Path, timeout: float, *request: Any) -> None:
        """Start them. `folder` is empty, for files of this job; `timeout` is the seconds that an answer may take.

        The ranks answer `request` before they connect to the bench, so that nothing lets them sleep until then.
        """
        self.name = library.name
        self.answers: list[Any] = []  # of the ranks to `request`
        self.timeout = timeout
        self.versions: dict[str, str] = {}
        self._log = folder / "log"
        self._connections: list[Connection] = []
        self._pidfds: dict[int, int] = {}  # by process
        (folder / ALIAS).symlink_to(PACKAGE)
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(folder, os.O_PATH)
            try:
                server.bind(f"/proc/self/fd/{fd}/socket")  # the path of the folder may be too long for a socket
            finally:
                os.close(fd)
            server.listen(ranks)
            self._launcher = self._start(library, ranks, folder, request)
            try:
                self._accept(server, ranks)
            except BaseException:
                self.kill()
                raise

    def _start(
        self, library: LibrarySpec, ranks: int, folder: Path, request: tuple[Any, ...]
    ) -> "subprocess.Popen[bytes]":
        path = filter(None, [str(folder), library.environment.get("PYTHONPATH")])
        environment = {**library.environment, "PYTHONPATH": os.pathsep.join(path)}
        command = [
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *library.launcher(ranks),
            *(library.python, "-m", ALIAS, library.module, library.rank_variable, str(folder), library.device),
            *("bound" if library.bound else "free", json.dumps(request)),
        ]
        # Python would only print what a signal handler raises between fork and exec.
        with self._log.open("wb") as log, deferred_signals() as restore_mask:

            def begin() -> None:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                restore_mask()

            # In its own session: Ctrl-C reaches the bench alone.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=begin,
            )

    def _accept(self, server: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        server.settimeout(0.1)
        connected: dict[int, Connection] = {}
        outcomes: dict[int, tuple[str, Any]] = {}
        while len(connected) < ranks:
            if self._launcher.poll() is not None:
                raise JobFailed(f"could not be started: {self._reason()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"only {len(connected)} of {ranks} ranks connected within {START_TIMEOUT:g} s")
            with suppress(TimeoutError):
                connection = Connection(server.accept()[0].detach())
                try:
                    if not wait([connection], deadline - time.monotonic()):
                        raise JobFailed(f"a rank sent no greeting within {START_TIMEOUT:g} s")
                    hello = json.loads(connection.recv_bytes())
                    self._pidfds[hello["pid"]] = os.pidfd_open(hello["pid"])
                except (EOFError, ConnectionError, ProcessLookupError):
                    raise JobFailed(f"could not be started: {self._reason()}") from None
                connected[hello["rank"]], outcomes[hello["rank"]] = connection, hello["outcome"]
                self.versions = hello["versions"]
        self._connections = [connected[rank] for rank in range(ranks)]
        self.answers = answers_of(outcomes, ranks)

    def request(self, name: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Send a request to all ranks; return the answer of each. Raise Unsupported, or kill the job and raise
        JobFailed. `timeout` is in seconds, by default that of the job.
        """
        try:
            return self._request(self.timeout if timeout is None else timeout, name, *arguments)
        except Unsupported:
            raise
        except BaseException:
            self.kill()
            raise

    def _request(self, timeout: float, *request: Any) -> list[Any]:
        deadline = time.monotonic() + timeout
        with suppress(BrokenPipeError):  # reported below, with its reason
            for connection in self._connections:
                connection.send_bytes(json.dumps(request).encode())
        outcomes: dict[int, tuple[str, Any]] = {}
        while silent := [connection for rank, connection in enumerate(self._connections) if rank not in outcomes]:
            ready = wait(silent, deadline - time.monotonic())
            if not ready:
                break
            for rank, connection in enumerate(self._connections):
                if connection not in ready:
                    continue
                try:
                    outcomes[rank] = json.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise JobFailed(f"rank {rank} ended during a request: {self._reason()}") from None
                if outcomes[rank][0] != "done":  # the others may be waiting for this rank
                    deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT)
        answers = answers_of(outcomes, len(self._connections))
        if silent:
            ranks = ", ".join(str(self._connections.index(connection)) for connection in silent)
            raise JobFailed(f"hangs: no answer from rank {ranks} within {timeout:g} s")
        return answers

    def _reason(self) -> str:
        for connection in self._connections:  # the other ranks end too; the launcher waits for them
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_WR)  # but can still answer: an error of that would hide the reason
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(EXIT_TIMEOUT)  # it may still print the reason
        reason = failure_reason(self._log.read_text(errors="replace"))
        return reason or f"its launcher ended with status {self._launcher.poll()}"

    def close(self) -> None:
        """Let the ranks finalize their library and end."""
        with suppress(JobFailed, Unsupported, subprocess.TimeoutExpired):  # all measurements are done
            self.request("close")
            self._launcher.wait(EXIT_TIMEOUT)
        self.kill()

    def kill(self) -> None:
        """Kill every process of this job, and remove the shared memory that they leave. Idempotent."""
        files = {path for pid in self._pidfds for path in shared_files(pid)}
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds.clear()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        with suppress(ProcessLookupError):
            self._launcher.terminate()
        try:
            self._launcher.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        for path in files:
            with suppress(OSError):  # the library has removed it
                os.unlink(path)


def answers_of(outcomes: dict[int, tuple[str, Any]], ranks: int) -> list[Any]:
    """Return the answers of these ranks in order; raise Unsupported or JobFailed if one has none but a reason."""
    if failed := [f"rank {rank}: {value}" for rank, (outcome, value) in outcomes.items() if outcome != "done"]:
        raise (Unsupported if len(failed) == ranks else JobFailed)(failed[0])
    return [value for _, (_, value) in sorted(outcomes.items())]


def failure_reason(log: str) -> str:
    """Return the line of a log that best explains why the ranks ended, shortened; empty if none does."""
    lines = log.splitlines()
    # `ringcomm run` names the first rank that ended. The others only report that they lost it.
    if first := re.search(r"^ringcomm run: rank (\d+) .*", log, re.MULTILINE):
        lines = [first[0], *(line for line in lines if line.startswith(f"[{first[1]}] "))]
    for pattern in REASONS:
        if found := [line for line in lines if re.match(pattern, line)]:
            return textwrap.shorten(found[-1], MOST_CHARACTERS, placeholder=" …")
    return ""


def shared_files(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process maps shared. MPICH leaves its own when it is killed."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    mapped = [words for line in lines if len(words := line.split(None, 5)) == 6]
    shared = {path for _, permissions, _, _, _, path in mapped if permissions[3] == "s"}
    return {path for path in shared if os.path.dirname(path) == "/dev/shm" and not path.endswith("(deleted)")}
