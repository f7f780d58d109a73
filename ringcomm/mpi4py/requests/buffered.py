"""Buffered sends that may still run, and the memory that a program attaches for them."""

import threading
from typing import Any

from ringcomm.mpi4py.base.buffer import buffer_of
from ringcomm.mpi4py.base.constants import BUFFER_AUTOMATIC, Constant
from ringcomm.mpi4py.base.errors import ERR_BUFFER, failure, handled
from ringcomm.mpi4py.requests.operations import DONE, PendingOperation
from ringcomm.mpi4py.requests.request import Request

__all__ = ["Buffered", "BufferedSends"]


class BufferedSends:
    """The sends of Bsend that may still run, and the memory that the program has attached for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # nobody waits for a send while holding it
        self._works: list[Any] = []
        self._memory: Any = None

    def add(self, work: Any) -> None:
        """Keep a send that has started, and forget completed ones."""
        with self._lock:
            self._works = [each for each in self._works if not each.done()]
            self._works.append(work)

    def attach(self, memory: Any) -> None:
        """Remember the memory for `detach`. It is not needed: each send has memory of its own."""
        if not (memory is None or isinstance(memory, Constant)):
            buffer_of(memory, writable=True)  # raises BufferError if it is read-only
        with self._lock:
            if self._memory is not None:
                raise failure(ERR_BUFFER, "expected no attached buffer, got one: detach it first")
            self._memory = BUFFER_AUTOMATIC if memory is None else memory

    def detach(self) -> Any:
        """Wait for the sends, and return the memory that was attached."""
        self.flush()
        with self._lock:
            memory, self._memory = self._memory, None
        return memory

    def flush(self) -> None:
        """Wait for the sends that have started."""
        with self._lock:
            works = list(self._works)  # which stay, so that a flush in another thread waits for them, too
        try:
            for work in works:
                work.wait()
        finally:
            with self._lock:
                self._works = [each for each in self._works if each not in works]


class Buffered:
    """The methods of a communicator that manage its buffered sends."""

    _object: Any  # a Context

    @handled
    def Attach_buffer(self, buf: Any) -> None:
        """Attach memory for Bsend. It is not needed."""
        self._object.buffered.attach(buf)

    @handled
    def Detach_buffer(self) -> Any:
        """Wait for the buffered sends, and return the memory that was attached."""
        return self._object.buffered.detach()

    @handled
    def Flush_buffer(self) -> None:
        """Wait for the buffered sends."""
        self._object.buffered.flush()

    def Iflush_buffer(self) -> Request:
        """Wait for the buffered sends; the request is complete."""
        self.Flush_buffer()
        return Request._of(PendingOperation(self._object, DONE))
