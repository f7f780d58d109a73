"""The ranks of one library, and the conversation with them. They sleep while another library is measured."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ringcomm.bench.interrupts import uninterrupted
from ringcomm.bench.peers import Contender

__all__ = ["START", "Job", "JobFailed", "Refused", "last_words"]

PACKAGE = Path(__file__).parent / "rank"
ALIAS = "ringcomm_bench_rank"  # its name where the rest of ringcomm is not installed
PR_SET_PDEATHSIG = 1
START = 60.0  # seconds until all ranks have imported their library and met, or are ready for the first question
GOODBYE = 5.0  # seconds for a launcher to end by itself
WORDS = 200  # characters of what a dying library said, at most
REASONS = (  # the best first
    r"(\[\d+\] )?((\w+\.)+[A-Z]\w*|\w+(Error|Exception)): ",  # the last line of an exception
    r".*(killed by|signal \d)",  # a launcher, about a rank that could not say anything
    r".*\w",
)


class JobFailed(Exception):
    """The ranks of a library crashed, hung or refused; they have been ended."""


class Refused(Exception):
    """All ranks of a library say that they cannot do what was asked; they can do other things."""


class Job:
    """All ranks of one library."""

    def __init__(self, contender: Contender, ranks: int, folder: Path, patience: float) -> None:
        """Start them; `folder` is a new one for files of this job, `patience` the seconds an answer may take."""
        self.name = contender.name
        self.patience = patience
        self.versions: dict[str, str] = {}
        self._log = folder / "log"
        self._connections: list[Connection] = []
        self._pidfds: list[int] = []
        self._pids: list[int] = []
        (folder / ALIAS).symlink_to(PACKAGE)
        with socket.socket(socket.AF_UNIX) as server:
            place = os.open(folder, os.O_PATH)
            try:
                server.bind(f"/proc/self/fd/{place}/socket")  # its own path may be too long for a socket
            finally:
                os.close(place)
            server.listen(ranks)
            self._launcher = self._start(contender, ranks, folder)
            try:
                self._meet(server, ranks)
            except BaseException:
                self.kill()
                raise

    def _start(self, contender: Contender, ranks: int, folder: Path) -> "subprocess.Popen[bytes]":
        path = filter(None, [str(folder), contender.environment.get("PYTHONPATH")])
        environment = {**contender.environment, "PYTHONPATH": os.pathsep.join(path)}
        arguments = (contender.module, contender.rank_variable, str(folder), contender.device)
        command = [
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *contender.launcher(ranks),
            *(contender.python, "-m", ALIAS, *arguments),
        ]
        # What a signal raises between fork and exec Python would only print.
        with self._log.open("wb") as log, uninterrupted() as allow:

            def begin() -> None:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                allow()

            # In a session of its own, so that Ctrl-C reaches the bench alone.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=begin,
            )

    def _meet(self, server: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + START
        server.settimeout(0.1)
        arrived: dict[int, Connection] = {}
        while len(arrived) < ranks:
            if self._launcher.poll() is not None:
                raise JobFailed(f"could not be started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"only {len(arrived)} of {ranks} ranks came within {START:g} s")
            with suppress(TimeoutError):
                connection = Connection(server.accept()[0].detach())
                try:
                    if not wait([connection], deadline - time.monotonic()):
                        raise JobFailed(f"a rank said nothing within {START:g} s")
                    hello = json.loads(connection.recv_bytes())
                    self._pidfds.append(os.pidfd_open(hello["pid"]))
                    self._pids.append(hello["pid"])
                except (EOFError, ConnectionError, ProcessLookupError):
                    raise JobFailed(f"could not be started: {self._last_words()}") from None
                arrived[hello["rank"]] = connection
                self.versions = hello["versions"]
        self._connections = [arrived[rank] for rank in range(ranks)]

    def ask(self, request: str, *arguments: Any, limit: float | None = None) -> list[Any]:
        """Let all ranks do something; return what each answers, or raise Refused. If some of them cannot, the job is
        over: JobFailed. `limit` are the seconds it may take, if not those of the patience.
        """
        try:
            return self._ask(self.patience if limit is None else limit, request, *arguments)
        except Refused:
            raise
        except BaseException:
            self.kill()
            raise

    def _ask(self, limit: float, *request: Any) -> list[Any]:
        deadline = time.monotonic() + limit
        with suppress(BrokenPipeError):  # it is found out below, with its last words
            for connection in self._connections:
                connection.send_bytes(json.dumps(request).encode())
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while silent := [c for rank, c in enumerate(self._connections) if rank not in answers and rank not in failed]:
            ready = wait(silent, deadline - time.monotonic())
            for rank, connection in enumerate(self._connections):
                if connection not in ready:
                    continue
                try:
                    outcome, value = json.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise JobFailed(f"rank {rank} ended in the middle: {self._last_words()}") from None
                (answers if outcome == "done" else failed)[rank] = value
                if failed:  # the others may be waiting for this one
                    deadline = min(deadline, time.monotonic() + GOODBYE)
            if not ready:
                break
        for rank, reason in failed.items():
            everybody = len(failed) == len(self._connections)
            raise (Refused if everybody else JobFailed)(f"rank {rank}: {reason}")
        if silent:
            ranks = ", ".join(str(self._connections.index(connection)) for connection in silent)
            raise JobFailed(f"hangs: no answer from rank {ranks} within {limit:g} s")
        return [answers[rank] for rank in range(len(self._connections))]

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GOODBYE)  # it may have to say why
        said = last_words(self._log.read_text(errors="replace"))
        return said or f"its launcher ended with status {self._launcher.poll()}"

    def close(self) -> None:
        """Let the ranks end in order, and wait for that."""
        try:
            self.ask("close")
            self._launcher.wait(GOODBYE)
        except (JobFailed, Refused, subprocess.TimeoutExpired):
            pass  # nothing more is measured
        self.kill()

    def kill(self) -> None:
        """End every process of this job, and remove the shared memory of ranks that had no time to. Idempotent."""
        files = {path for pid in self._pids for path in shared_files(pid)}
        self._pids = []
        for pidfd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds = []
        for connection in self._connections:
            connection.close()
        self._connections = []
        with suppress(ProcessLookupError):
            self._launcher.terminate()
        try:
            self._launcher.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        for path in files:
            with suppress(OSError):  # its library has removed it
                os.unlink(path)


def last_words(log: str) -> str:
    """Return the line of a log that says best why the ranks ended, not too long; empty if none says anything."""
    lines = log.splitlines()
    # `ringcomm run` names the first rank that ended: all that the others can say is that they miss it.
    if first := re.search(r"^ringcomm run: rank (\d+) .*", log, re.MULTILINE):
        lines = [first[0], *(line for line in lines if line.startswith(f"[{first[1]}] "))]
    for reason in REASONS:
        if found := [line for line in lines if re.match(reason, line)]:
            return textwrap.shorten(found[-1], WORDS, placeholder=" …")
    return ""


def shared_files(pid: int) -> set[str]:
    """Return what lies right in /dev/shm and a process shares with others: MPICH leaves its own when it is killed."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    mapped = [words for line in lines if len(words := line.split(None, 5)) == 6]
    shared = {path for _, permissions, _, _, _, path in mapped if permissions[3] == "s"}
    return {path for path in shared if os.path.dirname(path) == "/dev/shm" and not path.endswith("(deleted)")}
