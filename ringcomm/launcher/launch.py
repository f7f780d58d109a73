"""`ringcomm.launch`: call a function on several ranks, as threads or in fresh processes.

A server (forkserver.py) forks the processes and kills them at the end of the launch. If the launching process is
killed, the server sees its connection close and kills them too.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import iscoroutinefunction
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from queue import Empty, SimpleQueue
from typing import Any

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host
from ringcomm.bootstrap.store import HashStore, shared_failure
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, PeerLost, RingcommError, integer, refuse, unknown
from ringcomm.launcher.pickling import LaunchSpec, RankResult, failed, pickled_spec, unpickled_result
from ringcomm.launcher.processes import EXIT_TIMEOUT, MAX_RANKS, START_CALLS, describe_exit
from ringcomm.machine import descriptors
from ringcomm.machine.threads import starting
from ringcomm.start import connect

__all__ = ["launch"]

log = logging.getLogger("ringcomm")

INTERRUPTED = "the launch was interrupted"
INTERRUPT_SLICE = 0.2  # seconds

importing_main = threading.Event()  # set while a rank imports the user's script


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
    be importable, or cloudpickle installed. `timeout` (seconds) applies to startup and to each call of `comm`, which is
    closed when `fn` returns.

    If `fn` raises on a rank, the communicators of the other ranks are aborted and the first error is raised here, with
    its rank in a note. A process that dies raises PeerLost with its rank and signal. Processes that do not exit within
    5 s after a failure are killed, and so are ranks that do not exit once `fn` has returned on all ranks: a process
    waits for the threads that `fn` has started and that are not daemons. Then the results are returned, and a warning
    of the logger "ringcomm" names rank and threads. No process is left running.

    The threads of world="threads" are joined, also after a failure. Nothing ends a thread: Ctrl-C aborts their
    communicators and waits 5 s at most; ranks that then still run Python code are named in a warning, and go on until
    this program exits.
    """
    if not callable(fn) or iscoroutinefunction(fn):
        raise refuse("fn", "a function that takes a communicator, not a coroutine", repr(fn))
    worlds = {"processes": _processes, "threads": _threads}
    if world not in worlds:
        raise unknown("world", world, worlds)
    size = integer("size", size)
    if not 1 <= size <= MAX_RANKS:
        raise refuse("size", f"1 to {MAX_RANKS} ranks", size)
    if importing_main.is_set():
        raise ArgumentError("importing the script called launch() on a rank: guard it with if __name__ == '__main__':")
    results = worlds[world](LaunchSpec(fn, tuple(args), dict(kwargs or {}), Config(timeout=timeout)), size)
    failures = [result for result in results if result.error]
    if failures:
        raise _first_error(failures, size)
    return [result.value for result in results]


def _first_error(failures: list[RankResult], size: int) -> Exception:
    """Return the first error, not its consequences on other ranks, nor their errors that name the rank that failed."""
    # Those whose own error names them: a rank in an error may be one of another communicator.
    named_by_themselves = {each.rank for each in failures if _names(each) == each.rank and not _is_consequence(each)}

    def order(each: RankResult) -> tuple[bool, bool, float]:
        return _is_consequence(each), _names(each) in named_by_themselves - {each.rank}, each.when

    first = min(failures, key=order)
    assert first.error is not None
    first.error.add_note(f"on rank {first.rank} of {size}")
    if first.trace and not first.error.__traceback__:  # from another process
        first.error.add_note(first.trace)
    return first.error


def _names(failure: RankResult) -> int | None:
    return failure.error.rank if isinstance(failure.error, RingcommError) else None


def _is_consequence(failure: RankResult) -> bool:
    return isinstance(failure.error, Aborted | PeerLost) and bool(failure.trace)


# --- Threads --------------------------------------------------------------------------------------------------------


def _threads(spec: LaunchSpec, size: int) -> list[RankResult]:
    store = HashStore()
    comms: list[Communicator] = []
    ended: SimpleQueue[RankResult] = SimpleQueue()

    def run(rank: int) -> None:
        try:
            with shared_failure(store, rank):
                comm = connect(rank, size, store, spec.config)
            with comm:
                comms.append(comm)
                store.check()  # a failure before `comm` was in `comms` has not aborted it
                result = RankResult(rank, spec.fn(comm, *spec.args, **spec.kwargs))
        except Exception as error:
            result = failed(rank, error)
        except BaseException as error:  # sys.exit() in a thread ends only the thread
            lost = PeerLost(f"the function of rank {rank} raised {error!r}", rank=rank)
            result = RankResult(rank, error=lost, when=time.monotonic())
        ended.put(result)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            with starting(f"the thread of {thread.name}"):
                thread.start()
        results = [_take(ended) for _ in threads]  # an interrupted join() would mark its thread as finished
    except BaseException:
        store.abort(Aborted(INTERRUPTED))
        for comm in [*comms]:
            with suppress(RingcommError):  # already closed
                comm.abort(Aborted(INTERRUPTED))
        _end(threads)
        raise
    for thread in threads:
        thread.join()
    return sorted(results, key=lambda result: result.rank)


def _take(results: "SimpleQueue[RankResult]") -> RankResult:
    """Return the next result. An interrupt just before a wait does not end it, so none is long."""
    while True:
        with suppress(Empty):
            return results.get(timeout=INTERRUPT_SLICE)


def _end(threads: list[threading.Thread]) -> None:
    """Wait for threads whose communicators were aborted; an interrupt may have come while one of them was started."""
    begin = time.monotonic()
    for thread in threads:
        while thread.ident is None and time.monotonic() < begin + INTERRUPT_SLICE:
            time.sleep(0.001)
        if thread.ident is not None:
            thread.join(max(0.0, begin + EXIT_TIMEOUT - time.monotonic()))
    if left := [thread.name for thread in threads if thread.is_alive()]:
        text = "%s, but these threads still run after %g s, and go on until the program exits: %s"
        log.warning(text, INTERRUPTED, EXIT_TIMEOUT, ", ".join(left))


# --- Processes ------------------------------------------------------------------------------------------------------


def _processes(spec: LaunchSpec, size: int) -> list[RankResult]:
    descriptors.provide_for_launcher(size)
    preparation, importable = _main_program()
    data = pickled_spec(spec, importable)
    place = Place(0, size, job=secrets.token_hex(), secret=secrets.token_hex(), launcher="launch")
    with _standard_descriptors(), ExitStack() as stack:
        place = stack.enter_context(serve_one_host(place))
        control, server_end = map(stack.enter_context, Pipe())
        pipes = [tuple(map(stack.enter_context, Pipe(duplex=False))) for _ in range(size)]
        ends = [server_end, *(sender for _, sender in pipes)]
        numbers = [end.fileno() for end in ends]
        path = [str(entry) for entry in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from ringcomm.launcher.forkserver import serve; serve(*{numbers})"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing passes them on
        command = [sys.executable, *flags, "-c", code]
        with starting("the process that forks the ranks", START_CALLS):
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=numbers, process_group=0)
        stack.callback(_stop, server, control)
        for end in ends:
            end.close()
        control.send((preparation, data, place))
        return _collect(server, control, [receiver for receiver, _ in pipes])


@contextmanager
def _standard_descriptors() -> Iterator[None]:
    """Open /dev/null at the descriptors 0 to 2 where these are closed: ranks would print into a pipe that got one."""
    opened = [os.open(os.devnull, os.O_RDWR)]
    while opened[-1] <= 2:
        os.set_inheritable(opened[-1], True)
        opened.append(os.open(os.devnull, os.O_RDWR))
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


def _main_program() -> tuple[dict[str, Any], bool]:
    """Return multiprocessing's preparation data (module path, main file), and whether ranks can import the main module.

    They cannot if it is a command-line string, stdin, or a __main__.py.
    """
    try:
        preparation = spawn.get_preparation_data("ringcomm")
    except FileNotFoundError:  # from os.getcwd()
        text = "the current directory, in which the ranks would start, has been deleted: change to another (os.chdir)"
        raise ArgumentError(text) from None
    del preparation["authkey"]  # cannot be pickled, and is not needed
    if "init_main_from_name" in preparation:
        return preparation, preparation["init_main_from_name"].rpartition(".")[2] != "__main__"
    if os.path.isfile(preparation.get("init_main_from_path", "")):
        return preparation, True
    preparation.pop("init_main_from_path", None)
    return preparation, False


def _collect(server: "subprocess.Popen[bytes]", control: Connection, receivers: list[Connection]) -> list[RankResult]:
    """Wait until every process has exited.

    After the first failure they have EXIT_TIMEOUT seconds for it, and once all have returned, as many after each exit.
    """
    results: dict[int, RankResult] = {}
    pending = dict(enumerate(receivers))
    running = set(pending)
    deadline: float | None = None

    def take(rank: int) -> None:
        try:
            data = pending.pop(rank).recv_bytes()
        except (EOFError, OSError):  # it died before or while it sent the result
            return
        results[rank] = unpickled_result(rank, data)

    while running:
        ready = wait([control, *pending.values()], None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            take(rank)
        if control in ready:
            try:
                ended = control.recv()
            except (EOFError, ConnectionResetError):
                raise RingcommError(f"the process that forks the ranks {describe_exit(server.wait())}") from None
            if isinstance(ended, RingcommError):
                raise ended
            rank, status, when = ended
            running.discard(rank)
            if rank in pending and pending[rank].poll():
                take(rank)
            if rank not in results:
                lost = PeerLost(f"rank {rank} {describe_exit(status)} before its function returned", rank=rank)
                results[rank] = RankResult(rank, error=lost, when=when)
        if any(result.error for result in results.values()):
            deadline = deadline or time.monotonic() + EXIT_TIMEOUT
        elif len(results) == len(receivers):
            deadline = time.monotonic() + EXIT_TIMEOUT
    if not any(result.error for result in results.values()):
        for rank in sorted(running):
            threads = ", ".join(map(repr, results[rank].threads)) or "none"
            text = "rank %d returned, but did not exit within %g s, and is killed; threads that it left running: %s"
            log.warning(text, rank, EXIT_TIMEOUT, threads)
    return [results[rank] for rank in sorted(results)]


def _stop(server: "subprocess.Popen[bytes]", control: Connection) -> None:
    """Let the server kill the ranks, their children, and itself."""
    with suppress(OSError):  # it has died
        control.send(None)
    with suppress(subprocess.TimeoutExpired):
        server.wait(EXIT_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # in case it could not
    server.wait()
