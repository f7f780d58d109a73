"""Point-to-point communication of Python objects, pickled by MPI.pickle."""

import warnings
from typing import Any

import numpy as np

from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.base.integers import integer
from ringcomm.mpi4py.base.options import options
from ringcomm.mpi4py.base.pickling import pickle
from ringcomm.mpi4py.calls.p2p import LARGEST_TAG, PointToPoint, core_tag, is_proc_null, match_tag
from ringcomm.mpi4py.requests.message import FROM_PROC_NULL, unpickled
from ringcomm.mpi4py.requests.operations import fill
from ringcomm.mpi4py.requests.request import Request
from ringcomm.mpi4py.requests.status import Status
from ringcomm.transports.messages import ANY_TAG as MATCH_ANY
from ringcomm.transports.messages import Envelope

__all__ = ["ObjectsPointToPoint"]


class ObjectsPointToPoint(PointToPoint):
    """The methods of a communicator that send and receive objects."""

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, pickled."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        fast = self._object.fast
        if not 0 <= tag <= LARGEST_TAG or fast.send_object(obj, dest, tag, pickle.codec) is NotImplemented:
            self._send_object(obj, dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until its receive has started."""
        self._send_object(obj, dest, tag, True)

    @handled
    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting for anybody."""
        self._isend_copy(_outgoing(obj, dest, tag), dest, tag)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. `buf` is deprecated and not used: memory is found for objects of any size."""
        if buf is not None:
            warnings.warn("the argument buf of recv is deprecated and not used", UserWarning, stacklevel=2)
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            fill(status, FROM_PROC_NULL)
            return None
        match = MATCH_ANY if tag == ANY_TAG else core_tag(tag)
        if status is None and match is not None:
            return self._object.fast.recv_object(source, match, pickle.codec)
        data, envelope = self._recv_bytes(source, tag)
        fill(status, envelope)
        return unpickled(data)

    @handled
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

    @handled
    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object."""
        return Request._of(self._isend(_outgoing(obj, dest, tag), dest, tag))

    @handled
    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; the send is complete once its receive has started."""
        return Request._of(self._isend(_outgoing(obj, dest, tag), dest, tag, True))

    @handled
    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object; the request is complete at once."""
        return Request._of(self._isend_copy(_outgoing(obj, dest, tag), dest, tag))

    @handled
    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object that is, pickled, at most `options.irecv_bufsz` bytes, or as long as `buf`."""
        if source == PROC_NULL:
            return Request._of(self._irecv(None, source, tag))
        if buf is None or isinstance(buf, int):
            data = np.empty(options.irecv_bufsz if buf is None else buf, np.uint8)
        else:
            data = np.frombuffer(buf, np.uint8)
        return Request._of(self._irecv(data, source, tag, lambda envelope: unpickled(data[: envelope.size])))

    @handled
    def _send_object(self, obj: Any, dest: int, tag: int, synchronous: bool = False) -> None:
        if (data := _outgoing(obj, dest, tag)) is not None:
            self._object.messages.send(data, dest, tag, synchronous)

    @handled
    def _recv_bytes(self, source: int, tag: int) -> tuple[bytes, Envelope]:
        return self._object.messages.recv_bytes(source, match_tag(tag))


def _outgoing(obj: Any, dest: int, tag: int) -> Any:
    """Return the bytes to send, None for a send to PROC_NULL."""
    return None if is_proc_null(dest, tag) else pickle.dumps(obj)
