"""Messages that a matched probe has taken: no other receive gets them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.base.errors import ERR_REQUEST, FAILURES
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.base.pickling import pickle
from ringcomm.mpi4py.buffers.specification import received
from ringcomm.mpi4py.requests.operations import Done, PendingOperation
from ringcomm.mpi4py.requests.request import Request
from ringcomm.mpi4py.requests.status import Status
from ringcomm.transports.messages import Envelope

__all__ = ["MESSAGE_NO_PROC", "MESSAGE_NULL", "Message"]

FROM_PROC_NULL = Envelope(PROC_NULL, ANY_TAG, 0)

# Takes the size of a message; returns the array to receive it in, and the function that makes the result of it.
Prepare = Callable[[int], tuple[Any, Callable[[Envelope], Any]]]


@dataclass(eq=False)
class Taken:
    """A message that was taken, and the communicator that it came through; None for one from PROC_NULL."""

    context: Any = None
    message: Any = None


class Message(Handle):
    """A message that was taken by Mprobe or Improbe."""

    _object: Taken | None
    _null = ERR_REQUEST, "a message", "MESSAGE_NULL, or one that was received"

    @classmethod
    def Probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Self:
        """Wait for a message, and take it."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Self | None:
        """Take a message if there is one."""
        message = comm.Improbe(source, tag, status)
        return None if message is None else cls(message)

    probe, iprobe = Probe, Iprobe

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message."""
        self._start(_for_array(buf)).complete(status)

    def Irecv(self, buf: Any) -> Request:
        """Start to receive the message."""
        return Request._of(self._start(_for_array(buf)))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message, and return its object."""
        return self._start(_for_object).complete(status)

    def irecv(self) -> Request:
        """Start to receive the message; `wait` returns its object."""
        return Request._of(self._start(_for_object))

    def _start(self, prepare: Prepare) -> PendingOperation:
        """Start to receive; then the handle is null, unless it is the constant MESSAGE_NO_PROC.

        If there is no memory for the message, or the wrong one, it can still be received.
        """
        context, message = self._named.context, self._named.message
        if message is None:
            started = PendingOperation(context, Done(FROM_PROC_NULL))
        else:
            try:
                data, finish = prepare(message.envelope.size)
                started = PendingOperation(context, message.irecv(data), finish)
            except FAILURES as error:
                context.fail(error)
                raise
        if self is not MESSAGE_NO_PROC:
            self._nullify()
        return started


def _for_array(buf: Any) -> Prepare:
    def prepare(_: int) -> tuple[Any, Callable[[Envelope], Any]]:
        buffer = received(buf)
        return buffer.target(), lambda envelope: buffer.store(envelope.size)

    return prepare


def _for_object(size: int) -> tuple[Any, Callable[[Envelope], Any]]:
    data = np.empty(size, np.uint8)
    return data, lambda _: unpickled(data)


def unpickled(data: Any) -> Any:
    """Return the object of a message; an empty message is None."""
    return pickle.loads(data) if len(data) else None


MESSAGE_NULL: Message = constant("MESSAGE_NULL", Message())
MESSAGE_NO_PROC: Message = constant("MESSAGE_NO_PROC", Message._of(Taken()))
