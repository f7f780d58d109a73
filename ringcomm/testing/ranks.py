"""Warm ranks: processes that stay connected and call one function after another, since a start takes longer than most
tests."""

import multiprocessing
import os
import pickle
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ringcomm.communicator import Communicator
from ringcomm.config import LAUNCHER
from ringcomm.errors import Aborted, PeerLost, RingcommError, describe_error, integer, refuse, unknown
from ringcomm.launcher.launch import launch
from ringcomm.launcher.processes import MAX_RANKS, describe_exit
from ringcomm.machine import descriptors
from ringcomm.machine.threads import start_thread
from ringcomm.start import init

__all__ = [
    *("TIMEOUT", "WORLDS", "Pool", "ProcessPool", "RankOutcome"),
    *("answer", "call", "check_ranks", "close_pools", "first_error", "run", "start_process"),
]

TIMEOUT = 20.0  # seconds a call of a rank may take; docs/testing.md
WORLDS = ("processes", "threads")
GRACE = 1.0  # seconds the other ranks have after a failure: they may wait for the rank that failed


class RankOutcome(NamedTuple):
    """How a call has ended on a rank: with a value, or with an error and its description."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    description: Any = None
    consequence: bool = False  # of the failure of another rank
    usable: bool = True  # the communicator


Describe = Callable[[BaseException], Any]


def describe_by_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def run(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    world: str = "processes",
    env: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> list[Any]:
    """Call `fn(comm, *args)` on `size` ranks that have called functions before; return the results in rank order.

    The ranks and their communicator serve every call with this size and `env` until one fails, or leaves the
    communicator closed or broken: then new ones start. A call of a communicator may take 20 s.

    Args:
        fn: a function of a module that the ranks can import
        size: the number of ranks, from 1 to 1024
        world: "processes", or "threads", which `ringcomm.launch` starts anew each time
        env: variables in the environment of the processes
        limit: seconds after which processes that have not returned are killed: TimeoutError names their ranks

    Raises the first error of a rank with its traceback as a note, not what it has caused on other ranks.
    """
    check_ranks(size, world, env)
    if world == "threads":
        return launch(fn, size, world="threads", args=args, timeout=TIMEOUT)
    return _values(call(fn, args, size, env, limit=limit))


def _values(outcomes: Sequence[RankOutcome]) -> list[Any]:
    if failed := first_error(outcomes):
        assert failed.error
        if failed.description:
            failed.error.add_note(f"on rank {failed.rank}:\n{failed.description}")
        raise failed.error
    return [outcome.value for outcome in outcomes]


def check_ranks(size: int, world: str, env: Mapping[str, str] | None) -> None:
    if world not in WORLDS:
        raise unknown("world", world, WORLDS)
    if not 1 <= integer("size", size) <= MAX_RANKS:
        raise refuse("size", f"1 to {MAX_RANKS} ranks", size)
    if env and not (isinstance(env, Mapping) and all(isinstance(text, str) for pair in env.items() for text in pair)):
        raise refuse("env", "names and values that are strings", repr(env))
    if env and world == "threads":
        raise refuse("env", "none with threads, which have the environment of this process", repr(env))


def first_error(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """Return the first failure of these, which are in the order of their ends; one that caused others comes first."""
    failed = [outcome for outcome in outcomes if outcome.error]
    return min(failed, key=lambda outcome: outcome.consequence, default=None)


def call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    size: int,
    env: Mapping[str, str] | None = None,
    describe: Describe = describe_by_traceback,
    fresh: bool = False,
    limit: float | None = None,
) -> list[RankOutcome]:
    """Call `fn(comm, *args)` on warm processes, or fresh ones; return the outcomes as a Pool does."""
    key = size, frozenset((env or {}).items())
    pool, keep = None if fresh else _pools.pop(key, None), False
    if pool and not pool.alive:  # a rank has died since
        pool.kill()
        pool = None
    pool = pool or ProcessPool([env or {}] * size)
    try:
        outcomes = pool.call(fn, args, describe, limit)
        keep = not fresh and all(outcome.usable and not outcome.error for outcome in outcomes)
        return outcomes
    finally:
        if keep:
            _pools[key] = pool
        else:
            pool.kill()


def close_pools() -> None:
    """End all warm ranks."""
    while _pools:
        _pools.popitem()[1].close()


class Pool:
    """Ranks that wait for calls, at the other ends of these connections."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[BaseProcess] = ()) -> None:
        self.connections, self.processes = connections, processes

    def run(self, fn: Callable[..., Any], args: Sequence[Any], limit: float | None = None) -> list[Any]:
        """Call `fn(comm, *args)` on all ranks; return the results in rank order, or raise the first error."""
        return _values(self.call(fn, args, limit=limit))

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        describe: Describe = describe_by_traceback,
        limit: float | None = None,
    ) -> list[RankOutcome]:
        """Call `fn(comm, *args)` on all ranks; return their outcomes, after a failure in the order of their ends.

        `describe(error)` is called on the rank. After `limit` seconds, ranks that have not answered have failed.
        """
        self.start(fn, args, describe)
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(self.connections)}
        outcomes: list[RankOutcome] = []
        deadline = None if limit is None else time.monotonic() + limit
        while pending:
            try:
                ready = wait(pending, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except BaseException as error:  # of a signal handler
                error.add_note(f"{fn.__name__}: no answer yet from ranks {sorted(pending.values())}")
                raise
            if not ready:
                late = TimeoutError(f"{fn.__name__}: no answer from ranks {sorted(pending.values())}")
                outcomes += [RankOutcome(rank, error=late, consequence=bool(outcomes)) for rank in pending.values()]
                break
            outcomes += [self.receive(pending.pop(connection)) for connection in ready]
            if any(outcome.error for outcome in outcomes):
                deadline = min(deadline or sys.maxsize, time.monotonic() + GRACE)
        if not any(outcome.error for outcome in outcomes):
            outcomes.sort(key=lambda outcome: outcome.rank)
        return outcomes

    def start(self, fn: Callable[..., Any], args: Sequence[Any], describe: Describe = describe_by_traceback) -> None:
        for connection in self.connections:
            with suppress(BrokenPipeError, ConnectionResetError):  # the rank has died, as its answer tells
                connection.send((fn, args, describe))

    def receive(self, rank: int) -> RankOutcome:
        try:
            outcome: RankOutcome = self.connections[rank].recv()
        except (EOFError, ConnectionResetError):
            how = "has ended"
            if self.processes:
                self.processes[rank].join(GRACE)
                how = describe_exit(self.processes[rank].exitcode or 0)
            return RankOutcome(rank, error=ConnectionError(f"rank {rank} of {len(self.connections)} {how}"))
        return outcome._replace(rank=rank)


class ProcessPool(Pool):
    """Processes that are forked from the fork server of multiprocessing, and connected."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        """`environments`: variables for each rank."""
        size, job, secret = len(environments), secrets.token_hex(), secrets.token_hex()
        job_env = {"RINGCOMM_SIZE": str(size), "RINGCOMM_JOB": job, "RINGCOMM_JOB_SECRET": secret}
        descriptors.provide_for_launcher(size)
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        try:
            for rank, env in enumerate(environments):
                env_of_rank = {**job_env, **env, "RINGCOMM_RANK": str(rank)}
                process, connection = start_process(_serve, env_of_rank, name=f"rank {rank} of {size}")
                self.processes.append(process)
                self.connections.append(connection)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Let the ranks end."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(TIMEOUT)
        self.kill()

    def kill(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.kill()
            process.join()
            process.close()


_pools: dict[tuple[int, frozenset[tuple[str, str]]], ProcessPool] = {}


def start_process(fn: Callable[..., None], *args: Any, name: str) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `fn(connection, *args)`; return it, and the other end of the connection."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=fn, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


# --- On a rank --------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, env: Mapping[str, str]) -> None:
    start_thread("end with the tests", _end_with_parent)
    for name in LAUNCHER:  # of a job in which the tests run
        os.environ.pop(name, None)
    os.environ.update(env)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank that hangs is killed
    try:
        comm = init(None if "RINGCOMM_TIMEOUT" in os.environ else TIMEOUT)
    except RingcommError as error:
        connection.recv()
        connection.send(_failed(error, lambda _: None))  # it says everything
        return
    with comm:
        answer(connection, comm)


def _end_with_parent() -> None:
    """End this process when the one that runs the tests has been killed: the fork server lives on."""
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os._exit(1)


def answer(connection: Connection, comm: Any) -> None:
    """Call `fn(comm, *args)` for each request, until the other end closes."""
    fast_path = getattr(comm, "fast_path", None)  # MPI's communicators have none
    while True:
        try:
            fn, args, describe = connection.recv()
        except (EOFError, KeyboardInterrupt):  # an interrupt is for the process that runs the tests, too
            return
        try:
            outcome = RankOutcome(0, fn(comm, *args), usable=_is_usable(comm, fast_path))
            sent = pickle.dumps(outcome)
        except BaseException as error:
            sent = pickle.dumps(_failed(error, describe))
        connection.send_bytes(sent)


def _failed(error: BaseException, describe: Describe) -> RankOutcome:
    description = describe(error)
    # Also where it was raised from that of a call.
    consequence = isinstance(error.__cause__ or error, Aborted | PeerLost)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RingcommError(describe_error(error))
    return RankOutcome(0, error=error, description=description, consequence=consequence)


def _is_usable(comm: Any, fast_path: Any) -> bool:
    if isinstance(comm, Communicator):
        try:
            comm.check()
        except RingcommError:
            return False
        return comm.fast_path is fast_path  # without it the next calls would take the general path
    return True
