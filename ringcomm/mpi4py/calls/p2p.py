"""Point-to-point communication of arrays: blocking, nonblocking and persistent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.base.errors import ERR_RANK, ERR_TAG, failure, handled
from ringcomm.mpi4py.base.integers import integer
from ringcomm.mpi4py.buffers.specification import received, sent
from ringcomm.mpi4py.groups.context import Context
from ringcomm.mpi4py.requests.message import FROM_PROC_NULL
from ringcomm.mpi4py.requests.operations import DONE, Done, PendingOperation, Persistent, fill
from ringcomm.mpi4py.requests.prequest import Prequest
from ringcomm.mpi4py.requests.request import Request
from ringcomm.mpi4py.requests.status import Status
from ringcomm.transports import messages
from ringcomm.transports.requests import RECEIVE, SEND, SYNCHRONOUS_SEND

__all__ = ["LARGEST_TAG", "PointToPoint", "core_tag", "is_proc_null", "match_tag"]

LARGEST_TAG = 2**31 - 1
PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQfdFD"))  # dtypes of arrays that need no look at their specification

ndarray = np.ndarray


class PointToPoint:
    """The methods of a communicator that send and receive arrays."""

    _object: Context

    # --- Blocking -----------------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send an array."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        plain = dest >= 0 and 0 <= tag <= LARGEST_TAG
        if not plain or self._object.fast.send(buf, dest, tag, None, False) is NotImplemented:
            self._send(buf, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send an array, and wait until its receive has started."""
        self._send(buf, dest, tag, True)

    @handled
    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an array, without waiting for anybody."""
        self._isend_copy(_outgoing(buf, dest, tag), dest, tag)

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive an array."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        found: Any = self._object.fast.recv_message(buf, source, core_tag(tag))
        if found is NotImplemented:
            found = self._recv(buf, source, tag)
        if status is not None:
            fill(status, messages.Envelope(*found))

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
        found: Any = NotImplemented
        if not (type(dest) is type(source) is type(sendtag) is type(recvtag) is int):
            dest, source, sendtag, recvtag = map(integer, (dest, source, sendtag, recvtag))
        if 0 <= sendtag <= LARGEST_TAG:
            found = self._object.fast.sendrecv_message(sendbuf, dest, sendtag, recvbuf, source, core_tag(recvtag))
        if found is NotImplemented:
            self._exchange(sendbuf, dest, sendtag, recvbuf, source, recvtag).complete(status)
        elif status is not None:
            fill(status, messages.Envelope(*found))

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
        self._exchange(buf, dest, sendtag, buf, source, recvtag, copies=True).complete(status)

    # --- Nonblocking --------------------------------------------------------------------------------------------------

    # Plain arrays go straight to the core, which makes the request: see bindings/python/requests.cpp.

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an array."""
        context = self._object
        request: Request = context.requests.isend(context, buf, dest, tag)
        return self._started_send(buf, dest, tag) if request is NotImplemented else request

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an array; the send is complete once its receive has started."""
        context = self._object
        request: Request = context.requests.issend(context, buf, dest, tag)
        return self._started_send(buf, dest, tag, True) if request is NotImplemented else request

    @handled
    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a copy of an array; the request is complete at once."""
        return Request._of(self._isend_copy(_outgoing(buf, dest, tag), dest, tag))

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an array."""
        context = self._object
        request: Request = context.requests.irecv(context, buf, source, tag)
        return self._started_receive(buf, source, tag) if request is NotImplemented else request

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
        return Request._of(self._exchange(buf, dest, sendtag, buf, source, recvtag, copies=True))

    # --- Persistent ---------------------------------------------------------------------------------------------------

    @handled
    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare a send that can be started again and again."""
        return self._prepare_send(SEND, buf, dest, tag, self._isend)

    @handled
    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare an Issend that can be started again and again."""
        start = partial(self._isend, synchronous=True)
        return self._prepare_send(SYNCHRONOUS_SEND, buf, dest, tag, start)

    @handled
    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare an Ibsend that can be started again and again."""
        return self._prepare_send(None, buf, dest, tag, self._isend_copy)

    @handled
    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Prepare a receive that can be started again and again."""
        self._check_receive(source, tag)
        buffer = _incoming(buf, source)
        context = self._object
        named = Persistent(context, lambda: self._irecv_buffer(buffer, source, tag))
        named.prepare(context.requests, RECEIVE, buf, source, tag)
        return Prequest._of(named)

    # A ready send may take advantage of a receive that has started; here it is an ordinary one.
    Rsend, Irsend, Rsend_init = Send, Isend, Send_init

    # --- The general way ----------------------------------------------------------------------------------------------

    @handled
    def _send(self, buf: Any, dest: int, tag: int, synchronous: bool = False) -> None:
        if (data := _outgoing(buf, dest, tag)) is not None:
            self._object.messages.send(data, dest, tag, synchronous)

    @handled
    def _recv(self, buf: Any, source: int, tag: int) -> messages.Envelope:
        tag = match_tag(tag)
        if source == PROC_NULL:
            return FROM_PROC_NULL
        buffer = received(buf)
        found = self._object.messages.recv(buffer.target(), source, tag)
        buffer.store(found.size)
        return found

    @handled
    def _started_send(self, buf: Any, dest: int, tag: int, synchronous: bool = False) -> Request:
        return Request._of(self._isend(_outgoing(buf, dest, tag), dest, tag, synchronous))

    @handled
    def _started_receive(self, buf: Any, source: int, tag: int) -> Request:
        return Request._of(self._irecv_buffer(_incoming(buf, source), source, tag))

    def _isend(self, data: Any, dest: int, tag: int, synchronous: bool = False) -> PendingOperation:
        """Start a send; with data None, one to PROC_NULL."""
        context = self._object
        return PendingOperation(context, DONE if data is None else context.messages.isend(data, dest, tag, synchronous))

    def _isend_copy(self, data: Any, dest: int, tag: int) -> PendingOperation:
        context = self._object
        if data is not None:
            context.buffered.add(context.messages.isend(bytes(data), dest, tag))
        return PendingOperation(context, DONE)

    def _irecv(self, data: Any, source: int, tag: int, finish: Callable[[Any], Any] | None = None) -> PendingOperation:
        """Start a receive; with data None, one from PROC_NULL."""
        context = self._object
        work = Done(FROM_PROC_NULL) if data is None else context.messages.irecv(data, source, match_tag(tag))
        return PendingOperation(context, work, finish)

    def _irecv_buffer(self, buffer: Any, source: int, tag: int) -> PendingOperation:
        if buffer is None:
            return self._irecv(None, source, tag)
        return self._irecv(buffer.target(), source, tag, lambda envelope: buffer.store(envelope.size))

    @handled
    def _exchange(
        self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, copies: bool = False
    ) -> PendingOperation:
        """Start a send, of a copy if `copies`, and a receive; if the arguments of one are wrong, neither."""
        data = _outgoing(sendbuf, dest, sendtag)
        data = data.copy() if copies and data is not None else data
        self._check_receive(source, recvtag)
        buffer = _incoming(recvbuf, source)
        send = self._isend(data, dest, sendtag)  # which checks the destination before it starts
        return self._irecv_buffer(buffer, source, recvtag).with_send(send)

    # The callers of these are `handled`.

    def _prepare_send(
        self, kind: int | None, buf: Any, dest: int, tag: int, start: Callable[[Any, int, int], PendingOperation]
    ) -> Prequest:
        """Prepare a send by `start`; the core makes one of this kind, unless that is None, if it is plain."""
        context = self._object
        if dest >= context.size:
            raise failure(ERR_RANK, f"dest: expected a rank below {context.size}, or PROC_NULL, got {dest}")
        buffer = None if is_proc_null(dest, tag) else sent(buf)
        named = Persistent(context, lambda: start(None if buffer is None else buffer.data(), dest, tag))
        if kind is not None:
            named.prepare(context.requests, kind, buf, dest, tag)
        return Prequest._of(named)

    def _check_receive(self, source: int, tag: int) -> None:
        """Raise the error that a receive would raise when it starts."""
        match_tag(tag)
        size = self._object.size
        if source != PROC_NULL and not ANY_SOURCE <= source < size:
            raise failure(ERR_RANK, f"source: expected a rank below {size}, ANY_SOURCE or PROC_NULL, got {source}")


def _outgoing(buf: Any, dest: int, tag: int) -> Any:
    """Return the contiguous array to send, None for a send to PROC_NULL."""
    if is_proc_null(dest, tag):
        return None
    if type(buf) is ndarray and buf.dtype in PLAIN and buf.flags.c_contiguous:
        return buf
    return sent(buf).data()


def _incoming(buf: Any, source: int) -> Any:
    """Return the buffer to receive in, None for a receive from PROC_NULL."""
    return None if source == PROC_NULL else received(buf)


def core_tag(tag: int) -> int | None:
    """Return the tag that the core is to match, None for a wrong one, with which no call is plain."""
    if tag == ANY_TAG:
        return messages.ANY_TAG
    return tag if 0 <= tag <= LARGEST_TAG else None


def match_tag(tag: int) -> int:
    """Return the tag that the core is to match; refuse a wrong one."""
    found = core_tag(tag)
    if found is None:
        raise failure(ERR_TAG, f"tag: expected a number from 0 to {LARGEST_TAG}, or ANY_TAG, got {tag}")
    return found


def is_proc_null(dest: int, tag: int) -> bool:
    """Return whether the destination is PROC_NULL; refuse wrong tags and other negative ranks."""
    if dest >= 0 and 0 <= tag <= LARGEST_TAG:
        return False
    if not 0 <= tag <= LARGEST_TAG:
        raise failure(ERR_TAG, f"tag: expected a number from 0 to {LARGEST_TAG}, got {tag}")
    if dest != PROC_NULL:
        raise failure(ERR_RANK, f"dest: expected a rank, or PROC_NULL, got {dest}")
    return True
