"""The root's side of a pool: a thread that gives calls to idle workers and takes their answers.

The thread always waits for a message: from a worker, or from this rank itself when there is something new to do.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ringcomm.mpi4py import MPI
from ringcomm.mpi4py.futures.preparation import Preparation, main_module
from ringcomm.mpi4py.futures.worker import Answer, Assignment, Outcome

__all__ = ["PoolClient", "PoolManager"]


class RemoteTraceback(Exception):
    """The traceback in the worker, as the cause of an exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(eq=False)
class _Task:
    """A submitted call. Its future is pending until `begin`, and running until `finish` or `fail`."""

    client: "PoolClient"
    future: Future[Any]
    pickled: bytes

    def begin(self) -> bool:
        """Return whether to run the call. If not it was canceled, and those who wait for the future are notified."""
        return self.future.set_running_or_notify_cancel()

    def refuse(self, error: BaseException) -> None:
        """Fail before the call has begun."""
        if self.begin():
            self.fail(error)

    def finish(self, answer: Answer) -> None:
        """Set what the worker has sent."""
        try:
            value = MPI.pickle.loads(answer.value)
        except BaseException as error:
            self.fail(error)
            return
        if answer.outcome == Outcome.RETURNED:
            self.future.set_result(value)
        else:
            value.__cause__ = RemoteTraceback(answer.trace)
            self.fail(value)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class PoolManager:
    """Runs the calls of executors on all other ranks of a communicator. These are in `serve`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._rank = comm, comm.Get_rank()
        self._lock = threading.Lock()
        self._idle = deque(rank for rank in range(comm.Get_size()) if rank != self._rank)
        self.workers = len(self._idle)
        self._waiting: deque[_Task] = deque()
        self._running: dict[int, _Task] = {}  # by worker
        self._stopping = False
        self._woken = False  # a message to this rank is under way
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpi4py.futures", daemon=True)
        self._thread.start()

    def submit(self, call: _Task) -> None:
        """Queue a call."""
        with self._lock:
            if self._failure:
                raise _broken(self._failure)
            if self._stopping:
                raise RuntimeError("cannot submit after shutdown")
            self._waiting.append(call)
        self._wake()

    def cancel(self, client: "PoolClient") -> None:
        """Cancel the calls of a client that no worker has begun."""
        for call in self._take(client):
            call.future.cancel()
            call.begin()  # which notifies

    def stop(self) -> None:
        """End the workers once they have done what was submitted."""
        with self._lock:
            self._stopping = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, True
            if not woken and not self._failure and self._thread.is_alive():
                with suppress(Exception):  # after a failure, which ends the thread's wait as well
                    self._comm.send(None, self._rank)

    def _run(self) -> None:
        try:
            while self._hand_out():
                self._receive()
            for worker in self._idle:
                self._comm.send(None, worker)
        except BaseException as failure:  # a worker has died: every future must end
            with self._lock:
                self._failure = failure
                waiting, self._waiting = self._waiting, deque()
            for call in self._running.values():
                call.fail(_broken(failure))
            for call in waiting:
                call.refuse(_broken(failure))

    def _hand_out(self) -> bool:
        """Give calls to idle workers. Return whether there is anything left to wait for."""
        while True:
            with self._lock:
                if not (self._waiting and self._idle):
                    return bool(self._waiting or self._running or not self._stopping)
                call = self._waiting.popleft()
            if call.client.failure:
                call.refuse(call.client.failure)  # without the lock: callbacks of the future may submit calls
            elif call.begin():
                worker = self._idle.popleft()
                self._running[worker] = call
                self._comm.send(call.client.assignment(worker, call.pickled), worker)

    def _receive(self) -> None:
        status = MPI.Status()
        answer = self._comm.recv(status=status)  # from any rank
        worker = status.Get_source()
        if worker == self._rank:
            with self._lock:
                self._woken = False
            return
        call = self._running.pop(worker)
        self._idle.append(worker)
        if answer.outcome != Outcome.UNPREPARED:
            call.finish(answer)
            return
        call.client.failure = failure = BrokenExecutor(f"the initializer failed on worker {worker}:\n{answer.trace}")
        call.fail(failure)
        for each in self._take(call.client):
            each.refuse(failure)

    def _take(self, client: "PoolClient") -> list[_Task]:
        """Remove the waiting calls of a client."""
        with self._lock:
            taken = [call for call in self._waiting if call.client is client]
            self._waiting = deque(call for call in self._waiting if call.client is not client)
        return taken


class PoolClient(Executor):
    """An executor whose calls a manager runs; each worker is prepared before its first one.

    Each call is pickled when it is submitted, while the program's main module is still in place.
    """

    def __init__(self, manager: PoolManager, preparation: Preparation, main: bool) -> None:
        self._manager = manager
        self._main = main_module() if main else None
        self._preparation = MPI.pickle.dumps(preparation)
        self._prepared: set[int] = set()
        self._open: set[Future[Any]] = set()
        self.failure: BrokenExecutor | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.failure:
            raise self.failure
        future: Future[Any] = Future()
        try:
            pickled = MPI.pickle.dumps((fn, args, kwargs))
        except Exception as error:
            future.set_exception(error)
            return future
        self._manager.submit(_Task(self, future, pickled))
        self._open.add(future)  # only now: what was refused never ends
        future.add_done_callback(self._open.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._manager.cancel(self)
        if wait:
            futures.wait([*self._open])

    def assignment(self, worker: int, call: bytes) -> Assignment:
        """Return what the worker has to do for a call."""
        if worker in self._prepared:
            return Assignment(call)
        self._prepared.add(worker)
        return Assignment(call, self._preparation, self._main)


def _broken(failure: BaseException) -> BrokenExecutor:
    error = BrokenExecutor(f"the pool is broken: {failure}")
    error.__cause__ = failure
    return error
