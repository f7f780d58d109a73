"""Ranks for a running program: a function is called on each of them, as threads or in fresh processes.

The processes are forked by a server of their own (forkserver.py), which ends them all with the launch and, should that
be killed, with the launching process: the server notices the end of the connection.
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
from contextlib import ExitStack, suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, PeerLost, RingcommError, integer, refuse, unknown
from ringcomm.place import Place
from ringcomm.processes import GRACE, MOST_RANKS, ending
from ringcomm.start import connect
from ringcomm.store import HashStore, shared_failure

__all__ = ["launch"]

INTERRUPTED = "the launch was interrupted"

importing_main = threading.Event()  # set in a process of ours that imports the user's script


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
    size = integer("size", size)
    if not 1 <= size <= MOST_RANKS:
        raise refuse("size", f"1 to {MOST_RANKS} ranks", size)
    if importing_main.is_set():
        raise ArgumentError("a rank reached launch() by importing the script: put it under if __name__ == '__main__':")
    outcomes = worlds[world](Task(fn, tuple(args), dict(kwargs or {}), Config(timeout=timeout)), size)
    failures = [outcome for outcome in outcomes if outcome.error]
    if failures:
        raise _first(failures, size)
    return [outcome.value for outcome in outcomes]


class Task(NamedTuple):
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: Config


class Outcome(NamedTuple):
    """How a rank ended: with a value, or with an error, its time and its traceback; a process that died has none."""

    rank: int
    value: Any = None
    error: Exception | None = None
    when: float = 0.0
    trace: str = ""


def failed(rank: int, error: Exception) -> Outcome:
    return Outcome(rank, error=error, when=time.monotonic(), trace="".join(traceback.format_exception(error)))


def _first(failures: list[Outcome], size: int) -> Exception:
    """Return the error that came first, before those it led to on other ranks."""
    first = min(failures, key=lambda each: (isinstance(each.error, Aborted | PeerLost) and bool(each.trace), each.when))
    assert first.error is not None
    first.error.add_note(f"on rank {first.rank} of {size}")
    if first.trace and not first.error.__traceback__:  # it came from another process
        first.error.add_note(first.trace)
    return first.error


# --- Threads --------------------------------------------------------------------------------------------------------


def _threads(task: Task, size: int) -> list[Outcome]:
    store = HashStore()
    comms: list[Communicator] = []
    ended: SimpleQueue[Outcome] = SimpleQueue()
    outcomes: dict[int, Outcome] = {}

    def run(rank: int) -> None:
        try:
            with shared_failure(store, rank):
                comm = connect(rank, size, store, task.config)
            with comm:
                comms.append(comm)
                store.check()  # what ended the launch before this could not abort `comm`
                outcome = Outcome(rank, task.fn(comm, *task.args, **task.kwargs))
        except Exception as error:
            outcome = failed(rank, error)
        except BaseException as error:  # sys.exit() of a thread would end nothing
            lost = PeerLost(f"rank {rank} left its function by {error!r}", rank=rank)
            outcome = Outcome(rank, error=lost, when=time.monotonic())
        ended.put(outcome)

    def gather(count: int) -> None:
        while len(outcomes) < count:  # a join that is interrupted would take the thread for ended
            outcome = ended.get()
            outcomes[outcome.rank] = outcome

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        gather(size)
    except BaseException:
        store.abort(Aborted(INTERRUPTED))
        for comm in comms:
            with suppress(RingcommError):  # it is closed
                comm.abort(INTERRUPTED)
        gather(sum(thread.ident is not None for thread in threads))
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
    return [outcomes[rank] for rank in range(size)]


# --- Processes ------------------------------------------------------------------------------------------------------


def _processes(task: Task, size: int) -> list[Outcome]:
    preparation, importable = _main_program()
    data = _pickled(task, importable)
    place = Place(0, size, job=secrets.token_hex(), nonce=secrets.token_hex(), launcher="launch")
    with ExitStack() as stack:
        control, server_end = map(stack.enter_context, Pipe())
        pipes = [tuple(map(stack.enter_context, Pipe(duplex=False))) for _ in range(size)]
        ends = [server_end, *(sender for _, sender in pipes)]
        numbers = [end.fileno() for end in ends]
        path = [str(entry) for entry in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from ringcomm.forkserver import serve; serve(*{numbers})"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing passes them on
        server = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=subprocess.DEVNULL, pass_fds=numbers, process_group=0
        )
        stack.callback(_end, server, control)
        for end in ends:
            end.close()
        control.send((preparation, data, place))
        return _gather(control, [receiver for receiver, _ in pipes])


def _main_program() -> tuple[dict[str, Any], bool]:
    """Return what multiprocessing tells a new process: where modules are found, and which file is the main one; and
    whether the ranks can import that. They cannot where it was typed, or read from stdin, or is a __main__.py.
    """
    preparation = spawn.get_preparation_data("ringcomm")
    del preparation["authkey"]  # refuses to be pickled, and is not needed
    if "init_main_from_name" in preparation:
        return preparation, preparation["init_main_from_name"].rpartition(".")[2] != "__main__"
    if os.path.isfile(preparation.get("init_main_from_path", "")):
        return preparation, True
    preparation.pop("init_main_from_path", None)
    return preparation, False


def _pickled(task: Task, importable: bool) -> bytes:
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


def _gather(control: Connection, results: list[Connection]) -> list[Outcome]:
    """Wait for every process to end; once one has failed, for GRACE seconds more."""
    outcomes: dict[int, Outcome] = {}
    pending = dict(enumerate(results))
    running = len(results)
    deadline: float | None = None

    def take(rank: int) -> None:
        try:
            outcome = pending.pop(rank).recv_bytes()
        except (EOFError, OSError):  # it died before it sent, or in the middle of it
            return
        outcomes[rank] = pickle.loads(outcome)

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
                outcomes[rank] = Outcome(rank, error=lost, when=when)
        if deadline is None and any(outcome.error for outcome in outcomes.values()):
            deadline = time.monotonic() + GRACE
    return [outcomes[rank] for rank in sorted(outcomes)]


def _end(server: "subprocess.Popen[bytes]", control: Connection) -> None:
    """Let the server kill the ranks, wherever they are, with what they have started, and itself."""
    with suppress(OSError):  # it has died
        control.send(None)
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # if it could not
    server.wait()
