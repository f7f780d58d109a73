"""Messages that a matched probe has taken: nobody else can receive them."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.mpi4py import errors
from ringcomm.mpi4py.buffers import received
from ringcomm.mpi4py.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.handles import Handle, constant
from ringcomm.mpi4py.operations import Done, Started
from ringcomm.mpi4py.pickling import pickle
from ringcomm.mpi4py.request import Request
from ringcomm.mpi4py.status import Status
from ringcomm.transports.messages import Envelope

__all__ = ["MESSAGE_NO_PROC", "MESSAGE_NULL", "Message"]

FROM_NOBODY = Envelope(PROC_NULL, ANY_TAG, 0)


class Taken:
    """A message that was taken, and the communicator that it came through; None for one from PROC_NULL."""

    def __init__(self, context: Any = None, message: Any = None) -> None:
        self.context, self.message = context, message

    def start(self, data: Any, finish: Any) -> Started:
        """Start to receive into `data`."""
        if self.message is None:
            return Started(never, Done(FROM_NOBODY), finish)
        try:
            return Started(self.context.fail, self.message.irecv(data), finish)
        except RingcommError as error:
            self.context.fail(error)
            raise


class Message(Handle):
    """A message that was taken by Mprobe or Improbe."""

    _object: Taken | None

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
        self._start(buf).complete(status)

    def Irecv(self, buf: Any) -> Request:
        """Start to receive the message."""
        return Request._of(self._start(buf))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message, and return its object."""
        return self._start_object().complete(status)

    def irecv(self) -> Request:
        """Start to receive the message; `wait` returns its object."""
        return Request._of(self._start_object())

    def _start(self, buf: Any) -> Started:
        if self._object and self._object.message is None:
            return self._consume().start(None, None)
        buffer = received(buf)
        target = buffer.target()  # first: if this is refused, the message stays
        return self._consume().start(target, lambda envelope: buffer.store(envelope.size))

    def _start_object(self) -> Started:
        taken = self._consume()
        data = np.empty(taken.message.envelope.size if taken.message else 0, np.uint8)
        return taken.start(data, lambda _: unpickled(data))

    def _consume(self) -> Taken:
        """Return what was taken, and make the handle null, unless it is the constant MESSAGE_NO_PROC."""
        taken = self._object
        if taken is None:
            raise errors.Exception(errors.ERR_REQUEST)
        if self is not MESSAGE_NO_PROC:
            self._nullify()
        return taken


def unpickled(data: Any) -> Any:
    """Return the object of a message; an empty message is None."""
    return pickle.loads(data) if data.size else None


def never(error: RingcommError) -> Any:
    """Raise the error of an operation that cannot fail."""
    raise error


MESSAGE_NULL: Message = constant("MESSAGE_NULL", Message())
MESSAGE_NO_PROC: Message = constant("MESSAGE_NO_PROC", Message._of(Taken()))
