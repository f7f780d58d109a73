"""Ranks for a running program: a function is called on each of them, as threads or in fresh processes.

The processes are forked by a server of their own, a bare interpreter that has imported ringcomm and nothing of the
user's. It leads a process group of all ranks, which ends with the launch and, should that be killed, with the launching
process: the server notices the end of the connection.
"""

import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from ringcomm.communicator import Communicator, connect
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, PeerLost, RingcommError, refuse, unknown
from ringcomm.rendezvous import HashStore, Place, SocketStore

__all__ = ["launch"]

GRACE = 5.0  # seconds the other processes have to end by themselves when a rank has failed

INTERRUPTED = "the launch was interrupted"

_importing_main = False


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    world: str = "processes",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Call `fn(comm, *args, **kwargs)` on each of `size` ranks and return the results in rank order.

    `world` is "processes" or "threads". Processes are fresh: `fn`, its arguments and results are pickled, so `fn` must
    be importable, or cloudpickle installed. `timeout` (seconds) is that of the start and of each call of `comm`, which
    is closed when `fn` returns.

    When `fn` raises on a rank, the communicators of the others are aborted and the first failure is raised here, with a
    note that says which rank it was; processes that do not end within 5 s are killed, threads are waited for. A process
    that dies is a PeerLost that names its rank and signal. Nothing is left running.
    """
    worlds = {"processes": _processes, "threads": _threads}
    if world not in worlds:
        raise unknown("world", world, worlds)
    if size < 1:
        raise refuse("size", "at least 1 rank", size)
    if _importing_main:
        raise ArgumentError("a rank reached launch() by importing the script: put it under if __name__ == '__main__':")
    outcomes = worlds[world](_Task(fn, tuple(args), dict(kwargs or {}), Config(timeout=timeout)), size)
    failures = [outcome for outcome in outcomes if outcome.error]
    if failures:
        raise _first(failures, size)
    return [outcome.value for outcome in outcomes]


class _Task(NamedTuple):
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: Config


class _Outcome(NamedTuple):
    """How a rank ended: with a value, or at some time with an error and its traceback. One that just died has none."""

    rank: int
    value: Any = None
    error: Exception | None = None
    when: float = 0.0
    trace: str = ""


def _failed(rank: int, error: Exception) -> _Outcome:
    return _Outcome(rank, error=error, when=time.monotonic(), trace="".join(traceback.format_exception(error)))


def _first(failures: list[_Outcome], size: int) -> Exception:
    """Return the error that came first, before those it led to on other ranks."""
    first = min(failures, key=lambda each: (isinstance(each.error, Aborted | PeerLost) and bool(each.trace), each.when))
    assert first.error is not None
    first.error.add_note(f"on rank {first.rank} of {size}")
    if first.trace and not first.error.__traceback__:  # it came from another process
        first.error.add_note(first.trace)
    return first.error


# --- Threads --------------------------------------------------------------------------------------------------------


def _threads(task: _Task, size: int) -> list[_Outcome]:
    store = HashStore()
    comms: list[Communicator] = []
    interrupted = threading.Event()
    ended: SimpleQueue[_Outcome] = SimpleQueue()
    outcomes: dict[int, _Outcome] = {}

    def run(rank: int) -> None:
        try:
            with connect(rank, size, store, task.config) as comm:
                comms.append(comm)
                if interrupted.is_set():
                    raise Aborted(INTERRUPTED)
                outcome = _Outcome(rank, task.fn(comm, *task.args, **task.kwargs))
        except Exception as error:
            outcome = _failed(rank, error)
        except BaseException as error:  # sys.exit() of a thread would end nothing
            lost = PeerLost(f"rank {rank} left its function by {error!r}", rank=rank)
            outcome = _Outcome(rank, error=lost, when=time.monotonic())
        ended.put(outcome)

    def gather() -> None:
        while len(outcomes) < size:  # a join that is interrupted would take the thread for ended
            outcome = ended.get()
            outcomes[outcome.rank] = outcome

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        gather()
    except BaseException:
        interrupted.set()
        for comm in comms:
            with suppress(RingcommError):  # it is closed
                comm.abort(INTERRUPTED)
        gather()
        raise
    finally:
        for thread in threads:
            thread.join()
    return [outcomes[rank] for rank in range(size)]


# --- Processes ------------------------------------------------------------------------------------------------------


def _processes(task: _Task, size: int) -> list[_Outcome]:
    # What multiprocessing would tell a new process: where modules are found, and which file is the main one.
    preparation = spawn.get_preparation_data("ringcomm")
    del preparation["authkey"]  # refuses to be pickled, and is not needed
    data = _pickled(task, importable=not preparation.keys().isdisjoint({"init_main_from_name", "init_main_from_path"}))
    place = Place(0, size, job=secrets.token_hex(), nonce=secrets.token_hex(), launcher="launch")
    with ExitStack() as stack:
        control, server_end = map(stack.enter_context, Pipe())
        pipes = [tuple(map(stack.enter_context, Pipe(duplex=False))) for _ in range(size)]
        ends = [server_end, *(sender for _, sender in pipes)]
        numbers = [end.fileno() for end in ends]
        code = f"import sys; sys.path[:] = {sys.path!r}; from ringcomm.launch import _serve; _serve(*{numbers})"
        server = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=numbers, process_group=0
        )
        stack.callback(_end, server)
        for end in ends:
            end.close()
        control.send((preparation, data, place))
        return _gather(control, [receiver for receiver, _ in pipes])


def _pickled(task: _Task, importable: bool) -> bytes:
    """Pickle by name where the ranks will find the name, else by value."""
    reason = "the main program is not a file that they could import"
    try:
        data = pickle.dumps(task)
        if importable or b"__main__" not in data:
            return data
    except Exception as error:  # whatever the objects in it raise
        reason = str(error)
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(task))
    except ImportError:
        pass
    except Exception as error:
        reason = str(error)
    raise ArgumentError(
        f"{task.fn!r} with its arguments cannot be sent to other processes ({reason}): define it in a module, "
        "pip install cloudpickle, or use world='threads'"
    )


def _gather(control: Connection, results: list[Connection]) -> list[_Outcome]:
    """Wait for every process to end; once one has failed, for GRACE seconds more."""
    outcomes: dict[int, _Outcome] = {}
    pending = dict(enumerate(results))
    running = len(results)
    deadline: float | None = None

    def take(rank: int) -> None:
        with suppress(EOFError):  # it died while it sent, or before
            outcomes[rank] = pickle.loads(pending.pop(rank).recv_bytes())

    while running:
        ready = wait([control, *pending.values()], None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            take(rank)
        if control in ready:
            try:
                rank, status, when = control.recv()
            except (EOFError, ConnectionResetError):
                raise RingcommError("the process that starts the ranks has died") from None
            running -= 1
            if rank in pending and pending[rank].poll():
                take(rank)
            if rank not in outcomes:
                lost = PeerLost(f"rank {rank} {ending(status)} before its function returned", rank=rank)
                outcomes[rank] = _Outcome(rank, error=lost, when=when)
        if deadline is None and any(outcome.error for outcome in outcomes.values()):
            deadline = time.monotonic() + GRACE
    return [outcomes[rank] for rank in sorted(outcomes)]


def _end(server: "subprocess.Popen[bytes]") -> None:
    os.killpg(server.pid, signal.SIGKILL)  # the ranks too, and what they have started
    server.wait()


# --- In the other processes -------------------------------------------------------------------------------------------


def _serve(control_number: int, *numbers: int) -> None:
    """Fork the ranks, and tell the launching process how each ends."""
    control = Connection(control_number)
    senders = [Connection(number, readable=False) for number in numbers]
    preparation, data, place = control.recv()
    running = {}
    for rank, sender in enumerate(senders):
        pid = os.fork()
        if pid == 0:
            for end in (control, *senders):
                if end is not sender:
                    end.close()
            sender.send_bytes(_rank(preparation, data, replace(place, rank=rank)))
            return  # and the interpreter ends as it always does
        running[pid] = rank
    for sender in senders:
        sender.close()
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    while running:
        pid, status = os.wait()
        control.send((running.pop(pid), os.waitstatus_to_exitcode(status), time.monotonic()))
    signal.pause()


def _end_with(control: Connection) -> None:
    with suppress(EOFError, OSError):
        control.recv()
    os.killpg(0, signal.SIGKILL)


def _rank(preparation: dict[str, Any], data: bytes, place: Place) -> bytes:
    """Run one rank and return its outcome, pickled."""
    global _importing_main
    np.random.seed()  # a fork would draw the numbers that the others draw
    try:
        _importing_main = True
        spawn.prepare(preparation)
        _importing_main = False
        task: _Task = pickle.loads(data)
        with closing(SocketStore(place, task.config.timeout)) as store:
            comm = connect(place.rank, place.size, store, task.config)
        with comm:
            outcome = _Outcome(place.rank, task.fn(comm, *task.args, **task.kwargs))
        return pickle.dumps(outcome)
    except Exception as error:
        outcome = _failed(place.rank, error)
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)  # not every exception comes back
        return packed
    except Exception:
        summary = traceback.format_exception_only(outcome.error)[-1].strip()
        return pickle.dumps(outcome._replace(error=RingcommError(summary)))


def ending(status: int) -> str:
    """Return in words how a process ended, from its exit code as subprocess gives it."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"
