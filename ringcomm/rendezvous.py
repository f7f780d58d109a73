"""Where a rank finds itself and the others: its place, told by the launcher's environment, and a store to meet at."""

import hashlib
import hmac
import itertools
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ringcomm.errors import ArgumentError, CollectiveTimeout, PeerLost, refuse
from ringcomm.sockets import MESSAGE_BYTES, credentials, listen, packet_socket, stranger

__all__ = ["HashStore", "Place", "SocketStore", "Store", "find_place", "open_store"]

log = logging.getLogger("ringcomm")

LINGER = 5.0  # seconds for which rank 0 serves the others on, when it has all it needs itself


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which job this process is, and who said so."""

    rank: int
    size: int
    job: str
    nonce: str = ""
    launcher: str = "none"

    def environment(self) -> dict[str, str]:
        """Return this process's environment, changed so that a process started with it finds itself at this place."""
        told = {"RANK": self.rank, "SIZE": self.size, "JOB": self.job, "NONCE": self.nonce}
        return {**os.environ, **{f"RINGCOMM_{name}": str(value) for name, value in told.items()}}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher: `mark` shows that it was there, the others say what and where a rank is."""

    name: str
    mark: str
    rank: str
    size: str
    local_size: str
    job: tuple[str, ...] = ()


# The first that left its mark counts: on clusters, launchers start each other from the bottom of this table upwards.
LAUNCHERS = (
    _Launcher("ringcomm run", "RINGCOMM_RANK", "RINGCOMM_RANK", "RINGCOMM_SIZE", "RINGCOMM_SIZE", ("RINGCOMM_JOB",)),
    _Launcher(
        *("torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    _Launcher(
        *("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ),
    # srun may set PMI_RANK and PMI_SIZE too, but not this mark.
    _Launcher("MPICH", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # A batch script has SLURM_PROCID, but is no rank of a step. On one host TASKS_PER_NODE is one number, the size.
    _Launcher(
        *("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place a launcher gave this process; without a launcher, the only one of a world of one."""
    for launcher in LAUNCHERS:
        if launcher.mark in environ:
            return _place(launcher, environ)
    return Place(0, 1, job=f"alone/{os.getpid()}")


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    missing = [name for name in (launcher.rank, launcher.size, launcher.local_size) if name not in environ]
    if missing:
        raise ArgumentError(f"{launcher.mark} is set but {' and '.join(missing)} is not; {launcher.name} sets them all")
    told = f"{launcher.rank}={environ[launcher.rank]}, {launcher.size}={environ[launcher.size]}"
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    except ValueError:
        raise refuse(f"the place told by {launcher.name}", "whole numbers", told) from None
    if not 0 <= rank < size:
        raise refuse(f"the place told by {launcher.name}", "0 <= rank < size", told)
    if environ[launcher.local_size] != environ[launcher.size]:
        raise ArgumentError(
            f"the ranks of this job are on several hosts ({launcher.size}={size}, "
            f"{launcher.local_size}={environ[launcher.local_size]}); across hosts ringcomm needs mpi4py "
            "(pip install 'ringcomm[mpi]') or, under torchrun, ringcomm.torch, and this release has neither of the two"
        )
    job = [environ.get(name, "") for name in launcher.job] or [_hydra()]
    return Place(rank, size, "/".join((launcher.name, *job)), environ.get("RINGCOMM_NONCE", ""), launcher.name)


def _hydra() -> str:
    """Return what only the ranks of this mpiexec share. MPICH puts no job id into the environment; hydra, the parent of
    its ranks, stands for the job, and its start time tells it from an earlier one with the same process id.
    """
    pid = os.getppid()
    with suppress(OSError):  # another user's processes may be hidden
        while pid > 0:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            parent, start = rest.split()[1:20:18]
            if "hydra" in name:
                return f"{pid}/{start}"
            pid = int(parent)
    raise ArgumentError("MPI_LOCALNRANKS is set, but no process above this one is the hydra of MPICH, which sets it")


class Store(Protocol):
    """What the ranks of a start share before they share memory: values under names."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until some rank has set `key`; raise CollectiveTimeout after `timeout` seconds."""


class HashStore:
    """The store of ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise _unset(key, timeout)
            return self._values[key]


class SocketStore:
    """The store of ranks that are processes of one host: a socket named from user and job, served by rank 0.

    The constructor returns when this rank has joined. It raises ArgumentError where rank 0 refuses it: because another
    process came as the same rank, with another size, or without the nonce.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        digest = hashlib.sha256(place.job.encode()).hexdigest()
        address = f"\0ringcomm-{os.geteuid()}-{digest[:32]}"
        self._size = place.size
        self._server = _Server(place, address) if place.rank == 0 else None
        self._socket = self._server.client if self._server else _join(place, address, timeout)

    def set(self, key: str, value: bytes) -> None:
        self._send(f"set\0{key}\0".encode() + value)

    def get(self, key: str, timeout: float) -> bytes:
        self._send(f"get\0{timeout}\0{key}".encode())
        self._socket.settimeout(timeout + LINGER)  # rank 0 keeps the time: it knows who is missing
        try:
            kind, _, value = self._socket.recv(MESSAGE_BYTES).partition(b"\0")
        except TimeoutError:
            raise CollectiveTimeout(f"rank 0 did not answer within {timeout:g} s", rank=0) from None
        except ConnectionResetError:
            kind = value = b""
        if kind == b"value":
            return value
        if kind == b"absent":
            absent = json.loads(value)
            raise late(absent, self._size, timeout) if absent else _unset(key, timeout)
        raise PeerLost("rank 0 has left the start", rank=0)

    def close(self) -> None:
        """Say goodbye. Rank 0 waits until the others have done so too, as they may still ask for something."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy of this socket
        self._socket.close()
        if self._server:
            self._server.join()

    def _send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise refuse("a message to the store", f"at most {MESSAGE_BYTES} bytes", len(message))
        try:
            self._socket.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerLost("rank 0 has left the start", rank=0) from None


_starts = itertools.count()


@contextmanager
def open_store(place: Place, timeout: float) -> Iterator[Store]:
    """Open the store of a start. Every rank counts its starts, so that a second one does not meet the first."""
    start = next(_starts)
    if place.size == 1:
        yield HashStore()
        return
    store = SocketStore(replace(place, job=f"{place.job}#{start}"), timeout)
    try:
        yield store
    finally:
        store.close()


class _Server(threading.Thread):
    """Serves a SocketStore until every rank has come and gone, or rank 0 has gone before every rank came."""

    def __init__(self, place: Place, address: str) -> None:
        super().__init__(name="ringcomm store", daemon=True)
        self._place = place
        self._values: dict[str, bytes] = {}
        self._waiting: dict[socket.socket, tuple[str, float]] = {}  # the key it wants, and until when
        self._ranks: dict[socket.socket, int] = {}  # who is here
        self._pids: dict[int, int] = {0: os.getpid()}  # who has ever come
        self._end: float | None = None
        self._listener = listen(address, f"rank 0 of job {place.job!r}")
        self._open = ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._watch(self._listener, self._accept)
        self.client, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks[own] = 0
        self._watch(own, partial(self._serve, own))
        self.start()

    def run(self) -> None:
        with self._open:
            while not self._finished():
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._answer()

    def _finished(self) -> bool:
        if self._end is None:
            return False
        return len(self._pids) < self._place.size or not self._ranks or time.monotonic() > self._end

    def _patience(self) -> float | None:
        ends = [end for _, end in self._waiting.values()] + ([self._end] if self._end else [])
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _watch(self, peer: socket.socket, handler: Callable[[], None]) -> None:
        peer.setblocking(False)  # nobody can make the others wait
        self._open.callback(peer.close)
        self._selector.register(peer, selectors.EVENT_READ, handler)

    def _accept(self) -> None:
        with suppress(OSError):  # gone again
            peer, _ = self._listener.accept()
            if reason := stranger(peer):
                log.warning("refused a connection: %s", reason)
                peer.close()
            else:
                self._watch(peer, partial(self._serve, peer))

    def _serve(self, peer: socket.socket) -> None:
        try:
            message = peer.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._drop(peer)
        elif peer not in self._ranks:
            self._admit(peer, message)
        elif message.startswith(b"set\0"):
            _, key, value = message.split(b"\0", 2)
            self._values[key.decode()] = value
        else:
            _, timeout, key = message.split(b"\0", 2)
            self._waiting[peer] = key.decode(), time.monotonic() + float(timeout)

    def _admit(self, peer: socket.socket, message: bytes) -> None:
        pid, _ = credentials(peer)
        try:
            hello = json.loads(message)
            rank, size, nonce = int(hello["rank"]), int(hello["size"]), str(hello["nonce"])
        except (ValueError, TypeError, KeyError):
            log.warning("refused process %d: it does not speak like a rank", pid)
            self._drop(peer)
            return
        refusal = ""
        if not hmac.compare_digest(nonce.encode(), self._place.nonce.encode()):
            refusal = "it does not know the nonce of this job"
        elif size != self._place.size or not 0 <= rank < size:
            refusal = f"it came as rank {rank} of {size} to a job of {self._place.size}"
        elif rank in self._pids:
            refusal = f"rank {rank} is already taken by process {self._pids[rank]}"
        if refusal:
            log.warning("refused process %d: %s", pid, refusal)
            self._reply(peer, "refused", refusal.encode())
            self._drop(peer)
        else:
            self._ranks[peer], self._pids[rank] = rank, pid
            self._reply(peer, "welcome", b"")

    def _answer(self) -> None:
        """Answer those who wait: with the value where there is one now, with who is missing where time is up."""
        for peer, (key, end) in list(self._waiting.items()):
            if key in self._values:
                del self._waiting[peer]
                self._reply(peer, "value", self._values[key])
            elif time.monotonic() >= end:
                del self._waiting[peer]
                absent = [rank for rank in range(self._place.size) if rank not in self._pids]
                self._reply(peer, "absent", json.dumps(absent).encode())

    def _reply(self, peer: socket.socket, kind: str, value: bytes) -> None:
        with suppress(OSError):  # it has gone, and the next read says so
            peer.send(f"{kind}\0".encode() + value)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        self._waiting.pop(peer, None)
        if self._ranks.pop(peer, None) == 0:
            self._end = time.monotonic() + LINGER
        peer.close()


def _join(place: Place, address: str, timeout: float) -> socket.socket:
    """Connect to rank 0 as soon as it is there."""
    deadline = time.monotonic() + timeout
    hello = json.dumps({"rank": place.rank, "size": place.size, "nonce": place.nonce}).encode()
    pause = 0.001
    seen = ""
    while True:
        # Refused, busy or hung up: rank 0 is not there yet. An abstract address cannot be waited for, so try again.
        with suppress(ConnectionError, BlockingIOError, TimeoutError), ExitStack() as stack:
            peer = stack.enter_context(packet_socket())
            peer.settimeout(max(pause, deadline - time.monotonic()))
            peer.connect(address)
            reason = stranger(peer)
            if not reason:
                peer.send(hello)
                kind, _, text = peer.recv(MESSAGE_BYTES).partition(b"\0")
                if kind == b"refused":
                    raise ArgumentError(f"rank 0 refused this process: {text.decode()}", rank=place.rank)
                if kind == b"welcome":
                    stack.pop_all()
                    return peer
            elif reason != seen:
                log.warning("refused to join: %s", reason)
                seen = reason
        if time.monotonic() + pause > deadline:
            raise late([0], place.size, timeout)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def ranks(numbers: Collection[int]) -> str:
    """Return "rank 2", "ranks 2 and 3" or "ranks 1, 2 and 5"."""
    *first, last = map(str, sorted(numbers))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def late(absent: Collection[int], size: int, timeout: float) -> CollectiveTimeout:
    """Return the error that names who did not come to the start."""
    return CollectiveTimeout(f"{ranks(absent)} of {size} did not arrive within {timeout:g} s", rank=min(absent))


def _unset(key: str, timeout: float) -> CollectiveTimeout:
    return CollectiveTimeout(f"no rank has set {key!r} within {timeout:g} s")
