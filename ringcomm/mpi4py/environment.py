"""The world: how it starts and ends, and what is known of it."""

import atexit
import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

import ringcomm
from ringcomm.bootstrap.place import find_place
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import CollectiveTimeout, MismatchError, RingcommError, describe_error
from ringcomm.mpi4py.base import constants, errors
from ringcomm.mpi4py.base.errhandler import ERRORS_ABORT, ERRORS_ARE_FATAL
from ringcomm.mpi4py.base.handles import constant
from ringcomm.mpi4py.base.info import Info
from ringcomm.mpi4py.base.options import options
from ringcomm.mpi4py.comm.intracomm import Intracomm
from ringcomm.mpi4py.groups.context import OPEN, TIMEOUT, Context, announce_end, close_all
from ringcomm.mpi4py.groups.create_group import connect_alone, settings
from ringcomm.mpi4py.requests.buffered import BufferedSends
from ringcomm.mpi4py.requests.operations import DONE, PendingOperation
from ringcomm.mpi4py.requests.request import Request

__all__ = [
    "COMM_SELF",
    "COMM_WORLD",
    "Attach_buffer",
    "Detach_buffer",
    "Finalize",
    "Flush_buffer",
    "Get_hw_resource_info",
    "Get_library_version",
    "Get_processor_name",
    "Get_version",
    "Iflush_buffer",
    "Init",
    "Init_thread",
    "Is_finalized",
    "Is_initialized",
    "Is_thread_main",
    "Pcontrol",
    "Query_thread",
    "Wtick",
    "Wtime",
    "get_vendor",
]

log = logging.getLogger("ringcomm")

WARN_AFTER = 10.0  # seconds before Finalize says for which ranks it waits
LONGEST_PAUSE = 0.05  # seconds between two looks whether they have come
RANK = "MPI4PY_RINGCOMM_RANK"  # set for the processes that a rank starts: its process id, job and rank

COMM_WORLD: Intracomm = constant("COMM_WORLD", Intracomm())
COMM_SELF: Intracomm = constant("COMM_SELF", Intracomm())

_finalized = False
_exit_status: Any = None  # of the last call of sys.exit, also if it was caught
_process = 0  # which has called Init
_sends = BufferedSends()  # holds the memory attached for all communicators


def start() -> None:
    """Connect the ranks when MPI is imported, and disconnect at exit, as `mpi4py.rc` says."""
    if options.initialize:
        Init()
    if options.finalize or (options.finalize is None and options.initialize):
        atexit.register(_end)
        sys.exit = _exit


def _exit(status: Any = None, /) -> NoReturn:
    """Remember the status of `sys.exit`, which Python does not tell at exit; in another thread it ends that alone."""
    global _exit_status
    if threading.current_thread() is threading.main_thread():
        _exit_status = status
    raise SystemExit(status)


def Init() -> None:
    """Connect the ranks that were started together."""
    global _process
    if Is_initialized():
        raise errors.failure(errors.ERR_OTHER, "Init was called before")
    try:
        world = _connect_world()
        alone = world.split(world.rank)
    except RingcommError as error:
        raise errors.translate(error) from None
    assert alone is not None
    _process, ranks = os.getpid(), range(world.size)
    for handle, context in ((COMM_WORLD, Context(world, ranks)), (COMM_SELF, Context(alone, [world.rank]))):
        context.name = f"MPI_{'COMM_WORLD' if handle is COMM_WORLD else 'COMM_SELF'}"
        context.predefined, context.universe = True, world.size
        if options.errors in ("fatal", "abort", "default"):
            context.errhandler = ERRORS_ABORT if options.errors == "abort" else ERRORS_ARE_FATAL
        handle._object = context


def _connect_world() -> Communicator:
    """Connect the ranks. A process that a rank has started is a world of its own: the environment is that of the rank.

    The same process may become another program (`exec`), which is then the rank.
    """
    config = Config() if os.environ.get("RINGCOMM_TIMEOUT") else settings(TIMEOUT)
    place = find_place()
    process, _, rank = os.environ.get(RANK, "").partition(" ")
    this_rank = f"{place.job} {place.rank}"
    if rank == this_rank and process != str(os.getpid()):
        return connect_alone(config)
    world = ringcomm.init(config=config)
    os.environ[RANK] = f"{os.getpid()} {this_rank}"
    return world


def Init_thread(required: int = constants.THREAD_MULTIPLE) -> int:  # noqa: ARG001 (MPI_THREAD_MULTIPLE whatever is asked for)
    """Connect the ranks that were started together. Returns the level of thread support."""
    Init()
    return Query_thread()


def Finalize() -> None:
    """Disconnect, once all ranks have called this: until then what they have sent arrives."""
    if not Is_initialized() or _finalized:
        raise errors.failure(errors.ERR_OTHER, "Finalize was called before" if _finalized else "Init was not called")
    COMM_SELF._delete_attributes()
    COMM_WORLD._delete_attributes()
    announce_end()
    _await_others(COMM_WORLD._object.comm)
    _disconnect()


def _await_others(world: Communicator) -> None:
    """Wait until all ranks that live have called Finalize; say for which, if that takes long."""
    warn_at, pause = time.monotonic() + WARN_AFTER, 0.0001
    while True:
        try:
            work = world._await_close()
            while not work.done():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                if time.monotonic() > warn_at:
                    warn_at = math.inf
                    _name_absent(world)
            work.wait()
        except MismatchError:  # another rank was in another collective, and may send something after that
            time.sleep(pause)
            continue
        except CollectiveTimeout as error:
            if error.collective == "close":  # else of an earlier call, which has raised it
                log.warning("Finalize: %s", str(error).partition("\n")[0])
        except RingcommError:  # of ranks that are lost
            pass
        return


def _name_absent(world: Communicator) -> None:
    """Log which ranks have not called Finalize, and what the first one does; the first one that has does so."""
    reports = world._transport.rank_reports(1)
    calls = [each["calls"][0]["call"] if each["calls"] else None for each in reports]  # as "close() epoch 4"
    absent = [rank for rank, call in enumerate(calls) if call != calls[world.rank]]
    if absent and calls.index(calls[world.rank]) == world.rank:
        text = "Finalize: waiting for %s of %d; %s"
        log.warning(text, format_ranks(absent), world.size, world._transport.report(1).splitlines()[absent[0]])


def _disconnect() -> None:
    global _finalized
    try:
        close_all()
    finally:
        COMM_WORLD._nullify()
        COMM_SELF._nullify()
        os.environ.pop(RANK, None)  # processes started from now on may be ranks in place of this one
        _finalized = True


def _end() -> None:
    """Finalize at exit. After an error, do not wait for the other ranks; of an uncaught exception tell them."""
    if not Is_initialized() or _finalized or os.getpid() != _process:  # the child of a fork
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        with suppress(RingcommError):
            COMM_WORLD._object.comm.abort(describe_error(error))
    elif _exit_status:
        _disconnect()
    else:
        Finalize()


def Is_initialized() -> bool:
    """Return whether Init was called."""
    return bool(COMM_WORLD) or _finalized


def Is_finalized() -> bool:
    """Return whether Finalize was called."""
    return _finalized


def Query_thread() -> int:
    """Return the level of thread support, as `mpi4py.rc` has it."""
    level = options.thread_level if options.threads else "single"
    return int(getattr(constants, f"THREAD_{level.upper()}"))


def Is_thread_main() -> bool:
    """Return whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def Get_version() -> tuple[int, int]:
    """Return the version of the MPI standard."""
    return constants.VERSION, constants.SUBVERSION


def Get_library_version() -> str:
    """Return the name and version of the library."""
    return f"ringcomm {ringcomm.__version__}"


def get_vendor() -> tuple[str, tuple[int, ...]]:
    """Return the name and version of the library."""
    return "ringcomm", tuple(map(int, ringcomm.__version__.split(".")[:3]))


def Get_processor_name() -> str:
    """Return the name of the host."""
    return os.uname().nodename


def Get_hw_resource_info() -> Info:
    """Return an Info with the resources to which this process is bound."""
    return Info.Create({"hwloc://numanode": "false"})


def Wtime() -> float:
    """Return the time in seconds."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the resolution of Wtime, in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: there is no profiler to control."""


def Attach_buffer(buf: Any) -> None:
    """Attach memory for Bsend. It is not needed."""
    _sends.attach(buf)


def Detach_buffer() -> Any:
    """Wait for the buffered sends on all communicators, and return the memory that was attached."""
    Flush_buffer()
    return _sends.detach()


def Flush_buffer() -> None:
    """Wait for the buffered sends on all communicators."""
    for context in list(OPEN):
        context.handle().Flush_buffer()


def Iflush_buffer() -> Request:
    """Wait for the buffered sends on all communicators; the request is complete."""
    Flush_buffer()
    return Request._of(PendingOperation(COMM_WORLD._object, DONE))


def _comm_lock(comm: Any, key: Any = None) -> threading.Lock:
    """Return the lock of a communicator for one kind of calls."""
    lock: threading.Lock = comm._object.locks[key]
    return lock


def _commctx_intra(comm: Any) -> tuple[Any, int]:
    """Return a communicator whose messages no receive on this one matches, and a tag. Collective the first time."""
    context = comm._object
    with context.locks["_commctx_intra"]:
        if context.inner is None:
            context.inner = comm._split(0, context.rank)
    return Intracomm._of(context.inner), 0


def _comm_lock_table(comm: Any) -> dict[Any, Any]:
    """Return the locks of the collectives of objects on a communicator, which mpi4py's own tests look at."""
    locks: dict[Any, Any] = comm._object.locks
    return locks
