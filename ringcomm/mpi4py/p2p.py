"""Point-to-point: arrays, objects, persistent operations, probes."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ringcomm.errors import RingcommError
from ringcomm.mpi4py import rc
from ringcomm.mpi4py.buffers import received, sent
from ringcomm.mpi4py.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.errors import ERR_RANK, ERR_TAG, failure
from ringcomm.mpi4py.message import FROM_NOBODY, MESSAGE_NO_PROC, Message, Taken, unpickled
from ringcomm.mpi4py.operations import DONE, Done, Persistent, Started, fill
from ringcomm.mpi4py.pickling import pickle
from ringcomm.mpi4py.request import Prequest, Request
from ringcomm.mpi4py.status import Status
from ringcomm.transports import messages

__all__ = ["PointToPoint"]

PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQfdFD"))  # dtypes of arrays that need no look at their specification

ndarray = np.ndarray
MATCH_ANY = messages.ANY_TAG


class PointToPoint:
    """The point-to-point methods of a communicator."""

    _object: Any  # a Context

    # --- Arrays, blocking -----------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send an array."""
        context = self._object
        try:
            if dest >= 0 <= tag and context.fast.send(buf, dest, tag, None, False) is not NotImplemented:
                return
            if not _to_nobody(dest, tag):
                context.messages.send(_outgoing(buf), dest, tag)
        except RingcommError as error:
            context.fail(error)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send an array, and wait until its receive has started."""
        context = self._object
        try:
            if not _to_nobody(dest, tag):
                context.messages.send(_outgoing(buf), dest, tag, True)
        except RingcommError as error:
            context.fail(error)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an array, without waiting for anybody."""
        if not _to_nobody(dest, tag):
            self._isend_copy(_outgoing(buf), dest, tag)

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive an array."""
        context = self._object
        try:
            tag = tag if tag >= 0 else _any(tag)
            found = FROM_NOBODY if source == PROC_NULL else context.fast.recv_message(buf, source, tag)
            if found is NotImplemented:
                buffer = received(buf)
                found = context.messages.recv(buffer.target(), source, tag)
                buffer.store(found.size)
            if status is not None:
                fill(status, messages.Envelope(*found))
        except RingcommError as error:
            context.fail(error)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send one array and receive another at once."""
        self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag).complete(status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send an array, and receive another one in its place."""
        self._replace(buf, dest, sendtag, source, recvtag).complete(status)

    # --- Arrays, nonblocking ------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an array."""
        return Request._of(self._isend(None if _to_nobody(dest, tag) else _outgoing(buf), dest, tag))

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an array; the send is complete once its receive has started."""
        return Request._of(self._isend(None if _to_nobody(dest, tag) else _outgoing(buf), dest, tag, True))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a copy of an array; the request is complete at once."""
        self.Bsend(buf, dest, tag)
        return Request._of(Started(self._object.fail, DONE))

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an array."""
        if _is_plain(buf) and source != PROC_NULL:
            return Request._of(self._irecv(buf, source, tag))
        return Request._of(self._irecv_buffer(None if source == PROC_NULL else received(buf), source, tag))

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Start to send one array and to receive another."""
        return Request._of(self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start to send an array, and to receive another one in its place."""
        return Request._of(self._replace(buf, dest, sendtag, source, recvtag))

    # --- Arrays, persistent -------------------------------------------------------------------------------------------

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare a send that can be started again and again."""
        return self._prepare_send(buf, dest, tag, self._isend)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare an Issend that can be started again and again."""
        return self._prepare_send(buf, dest, tag, lambda data, dest, tag: self._isend(data, dest, tag, True))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare an Ibsend that can be started again and again."""
        return self._prepare_send(buf, dest, tag, self._isend_copy)

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Prepare a receive that can be started again and again."""
        buffer = None if source == PROC_NULL else received(buf)
        return Prequest._of(Persistent(lambda: self._irecv_buffer(buffer, source, tag)))

    # A ready send may take advantage of a receive that has started; here it is an ordinary one.
    Rsend, Irsend, Rsend_init = Send, Isend, Send_init

    # --- Objects ------------------------------------------------------------------------------------------------------

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, pickled."""
        if not _to_nobody(dest, tag):
            self.Send(_pickled(obj), dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until its receive has started."""
        if not _to_nobody(dest, tag):
            self.Ssend(_pickled(obj), dest, tag)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting for anybody."""
        if not _to_nobody(dest, tag):
            self._isend_copy(_pickled(obj), dest, tag)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. `buf` is deprecated and not used: memory is found for objects of any size."""
        if buf is not None:
            warnings.warn("the argument buf of recv is deprecated and not used", UserWarning, stacklevel=2)
        if source == PROC_NULL:
            fill(status, FROM_NOBODY)
            return None
        context = self._object
        try:
            message = context.messages.take(source, _any(tag))
            data = np.empty(message.envelope.size, np.uint8)
            envelope = message.recv(data)
        except RingcommError as error:
            context.fail(error)
        fill(status, envelope)
        return unpickled(data)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send one object and receive another."""
        sending = self.isend(sendobj, dest, sendtag)
        obj = self.recv(recvbuf, source, recvtag, status)
        sending.Wait()
        return obj

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object."""
        return Request._of(self._isend(None if _to_nobody(dest, tag) else _pickled(obj), dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; the send is complete once its receive has started."""
        return Request._of(self._isend(None if _to_nobody(dest, tag) else _pickled(obj), dest, tag, True))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object; the request is complete at once."""
        self.bsend(obj, dest, tag)
        return Request._of(Started(self._object.fail, DONE))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object that is, pickled, at most `rc.irecv_bufsz` bytes, or as long as `buf`."""
        if source == PROC_NULL:
            return Request._of(self._irecv(None, source, tag))
        if buf is None or isinstance(buf, int):
            data = np.empty(rc.irecv_bufsz if buf is None else buf, np.uint8)
        else:
            data = np.frombuffer(buf, np.uint8)
        return Request._of(self._irecv(data, source, tag, lambda envelope: unpickled(data[: envelope.size])))

    # --- Probes -------------------------------------------------------------------------------------------------------

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Literal[True]:
        """Wait for a message, without receiving it."""
        context = self._object
        try:
            fill(status, FROM_NOBODY if source == PROC_NULL else context.messages.probe(source, _any(tag)))
        except RingcommError as error:
            context.fail(error)
        return True

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether there is a message, without receiving it."""
        context = self._object
        try:
            envelope = FROM_NOBODY if source == PROC_NULL else context.messages.iprobe(source, _any(tag))
        except RingcommError as error:
            context.fail(error)
        if envelope is not None:
            fill(status, envelope)
        return envelope is not None

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message and take it: only its Recv can receive it."""
        context = self._object
        if source == PROC_NULL:
            fill(status, FROM_NOBODY)
            return MESSAGE_NO_PROC
        try:
            message = context.messages.take(source, _any(tag))
        except RingcommError as error:
            context.fail(error)
        fill(status, message.envelope)
        return Message._of(Taken(context, message))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Take a message if there is one."""
        context = self._object
        if source == PROC_NULL:
            fill(status, FROM_NOBODY)
            return MESSAGE_NO_PROC
        try:
            message = context.messages.itake(source, _any(tag))
        except RingcommError as error:
            context.fail(error)
        if message is None:
            return None
        fill(status, message.envelope)
        return Message._of(Taken(context, message))

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # --- Buffered sends -----------------------------------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Attach memory for Bsend. It is not needed."""
        self._object.buffered.attach(buf)

    def Detach_buffer(self) -> Any:
        """Wait for the buffered sends, and return the memory that was attached."""
        return self._object.buffered.detach()

    def Flush_buffer(self) -> None:
        """Wait for the buffered sends."""
        self._object.buffered.flush()

    def Iflush_buffer(self) -> Request:
        """Wait for the buffered sends; the request is complete."""
        self.Flush_buffer()
        return Request._of(Started(self._object.fail, DONE))

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def _isend(self, data: Any, dest: int, tag: int, synchronous: bool = False) -> Started:
        """Start a send; with data None, one to nobody."""
        context = self._object
        try:
            work = DONE if data is None else context.messages.isend(data, dest, tag, synchronous)
        except RingcommError as error:
            context.fail(error)
        return Started(context.fail, work)

    def _isend_copy(self, data: Any, dest: int, tag: int) -> Started:
        context = self._object
        if data is not None:
            try:
                context.buffered.add(context.messages.isend(data.copy(), dest, tag))
            except RingcommError as error:
                context.fail(error)
        return Started(context.fail, DONE)

    def _irecv(self, data: Any, source: int, tag: int, finish: Callable[[Any], Any] | None = None) -> Started:
        """Start a receive; with data None, one from nobody."""
        context = self._object
        if data is None:
            return Started(context.fail, Done(FROM_NOBODY))
        try:
            return Started(context.fail, context.messages.irecv(data, source, _any(tag)), finish)
        except RingcommError as error:
            context.fail(error)
            raise

    def _irecv_buffer(self, buffer: Any, source: int, tag: int) -> Started:
        if buffer is None:
            return self._irecv(None, source, tag)
        return self._irecv(buffer.target(), source, tag, lambda envelope: buffer.store(envelope.size))

    def _exchange(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int) -> Started:
        data = None if _to_nobody(dest, sendtag) else _outgoing(sendbuf)
        return self._both(data, dest, sendtag, recvbuf, source, recvtag)

    def _replace(self, buf: Any, dest: int, sendtag: int, source: int, recvtag: int) -> Started:
        data = None if _to_nobody(dest, sendtag) else _outgoing(buf).copy()
        return self._both(data, dest, sendtag, buf, source, recvtag)

    def _both(self, data: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int) -> Started:
        buffer = None if source == PROC_NULL else received(recvbuf)
        if source >= self._object.size:  # before the send starts, which checks its own rank
            raise failure(ERR_RANK, f"source: expected a rank below {self._object.size}, got {source}")
        send = self._isend(data, dest, sendtag)
        return self._irecv_buffer(buffer, source, recvtag).with_send(send)

    def _prepare_send(self, buf: Any, dest: int, tag: int, start: Callable[[Any, int, int], Started]) -> Prequest:
        buffer = None if _to_nobody(dest, tag) else sent(buf)
        return Prequest._of(Persistent(lambda: start(None if buffer is None else buffer.data(), dest, tag)))


def _is_plain(buf: Any) -> bool:
    """Return whether a buffer to receive in is an array that needs no look at its specification."""
    return type(buf) is ndarray and buf.dtype in PLAIN and buf.flags.carray


def _outgoing(buf: Any) -> Any:
    """Return the contiguous array to send."""
    if type(buf) is ndarray and buf.dtype in PLAIN and buf.flags.c_contiguous:
        return buf
    return sent(buf).data()


def _pickled(obj: Any) -> Any:
    return np.frombuffer(pickle.dumps(obj), np.uint8)


def _any(tag: int) -> int:
    """Return the tag to match."""
    if tag == ANY_TAG:
        return MATCH_ANY
    if tag < 0:
        raise failure(ERR_TAG, f"tag {tag}")
    return tag


def _to_nobody(dest: int, tag: int) -> bool:
    """Return whether the destination is PROC_NULL; refuse negative tags and other negative ranks."""
    if dest >= 0 <= tag:
        return False
    if tag < 0:
        raise failure(ERR_TAG, f"tag {tag}")
    if dest != PROC_NULL:
        raise failure(ERR_RANK, f"dest {dest}")
    return True
