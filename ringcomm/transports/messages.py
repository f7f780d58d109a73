"""Messages as MPI matches them, for arrays in host memory: by source and tag, of at most the length of the receive."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringcomm.adapters import CODES
from ringcomm.errors import refuse
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.contract import FastPath, Pending
from ringcomm.transports.core import NativeWork
from ringcomm.types import DTYPES

__all__ = ["ANY_SOURCE", "ANY_TAG", "Envelope", "MessageWork", "Messages", "TakenMessage"]

ANY_SOURCE = -1
ANY_TAG = -(2**63)  # RC_ANY_TAG, which no message has

OWN_TIMEOUT = -1.0  # the communicator's
BYTES = DTYPES["uint8"]

for _name in DTYPES:  # the fast path takes arrays of the dtypes in this table
    with suppress(TypeError):  # of ml_dtypes
        CODES[np.dtype(_name)]


class Envelope(NamedTuple):
    """What is known of a message beside its bytes. Of no message, as after a send: ANY_SOURCE, ANY_TAG and 0."""

    source: int
    tag: int
    size: int  # bytes


class StartedCall(Protocol):
    """A call that may run on after its caller has dropped it: `ringcomm.Work`."""

    def wait(self, timeout: float | None = None) -> Any: ...
    def done(self) -> bool: ...


# Takes the function that starts a call, its arguments, what makes the result from the source, and the memory in use.
StartCall = Callable[[Callable[..., Pending], tuple[Any, ...], Callable[[int], Any], object], StartedCall]


class Messages:
    """Messages of any length, matched as MPI matches them: by source and tag, either of which may be any.

    Arrays are C-contiguous NumPy arrays of any dtype without Python objects; their bytes are sent. A receive takes the
    first message that matches, of at most the bytes of its array. Calls use the timeout of the communicator.

    Raises:
        MismatchError: The message that matched a receive is too long. It is lost, its sender is done, and the
            communicator stays usable.
    """

    def __init__(self, handle: Any, fast_path: FastPath, start: StartCall) -> None:
        self._handle, self._start = handle, start
        self._send, self._recv = fast_path.send, fast_path.recv_message

    def send(self, data: NDArray[Any], peer: int, tag: int, synchronous: bool = False) -> None:
        """Send the bytes of `data`. A synchronous send returns only once a receive has matched it."""
        if not synchronous and self._send(data, peer, tag, None, False) is not NotImplemented:
            return
        send = lib.rc_send_synchronous if synchronous else lib.rc_send
        check(send(self._handle, *_memory(data, False), BYTES, peer, tag, OWN_TIMEOUT, NULL))

    def isend(self, data: NDArray[Any], peer: int, tag: int, synchronous: bool = False) -> "MessageWork":
        """Start `send`. Until it is done, do not write `data`."""
        send = lib.rc_send_synchronous if synchronous else lib.rc_send
        call = (self._handle, *_memory(data, False), BYTES, peer, tag, OWN_TIMEOUT)
        return MessageWork(self._start, send, call, data)

    def recv(self, data: NDArray[Any], peer: int, tag: int) -> Envelope:
        """Receive a message into the first bytes of `data`."""
        found = self._recv(data, peer, tag)
        if found is not NotImplemented:
            return tuple.__new__(Envelope, found)
        return self._receive(data, peer, tag)

    def irecv(self, data: NDArray[Any], peer: int, tag: int) -> "MessageWork":
        """Start `recv`. Until it is done, do not access `data`."""
        return self._start_receive(data, peer, tag)

    def probe(self, peer: int, tag: int) -> Envelope:
        """Wait for a message that such a receive would get; return what is known of it."""
        envelope = self._probe(peer, tag, True)
        assert envelope is not None
        return envelope

    def iprobe(self, peer: int, tag: int) -> Envelope | None:
        """Return what `probe` would return at once, or None."""
        return self._probe(peer, tag, False)

    def take(self, peer: int, tag: int) -> "TakenMessage":
        """Wait for a message that such a receive would get, and set it apart: no other receive gets it."""
        taken = self._take(peer, tag, True)
        assert taken is not None
        return taken

    def itake(self, peer: int, tag: int) -> "TakenMessage | None":
        """Return what `take` would return at once, or None."""
        return self._take(peer, tag, False)

    def _receive(self, data: NDArray[Any], peer: int, tag: int, taken: int = 0) -> Envelope:
        message = ffi.new("rc_message *")
        call = (*_memory(data, True), peer, tag, taken, OWN_TIMEOUT)
        check(lib.rc_recv_message(self._handle, *call, message, NULL))
        return _envelope(message)

    def _start_receive(self, data: NDArray[Any], peer: int, tag: int, taken: int = 0) -> "MessageWork":
        call = (self._handle, *_memory(data, True), peer, tag, taken, OWN_TIMEOUT, NULL)
        return MessageWork(self._start, lib.rc_recv_message, call, data)

    def _probe(self, peer: int, tag: int, waits: bool, taken: Any = NULL) -> Envelope | None:
        found, message = ffi.new("int *"), ffi.new("rc_message *")
        check(lib.rc_probe(self._handle, peer, tag, waits, OWN_TIMEOUT, found, message, taken))
        return _envelope(message) if found[0] else None

    def _take(self, peer: int, tag: int, waits: bool) -> "TakenMessage | None":
        taken = ffi.new("uint64_t *")
        envelope = self._probe(peer, tag, waits, taken)
        return None if envelope is None else TakenMessage(self, envelope, taken[0])


class TakenMessage:
    """A message that has been matched and not received yet. It can be received once."""

    def __init__(self, messages: Messages, envelope: Envelope, number: int) -> None:
        self.envelope = envelope
        self._messages, self._number = messages, number

    def recv(self, data: NDArray[Any]) -> Envelope:
        """Receive the message into the first bytes of `data`."""
        return self._messages._receive(data, self.envelope.source, self.envelope.tag, self._number)

    def irecv(self, data: NDArray[Any]) -> "MessageWork":
        """Start `recv`. Until it is done, do not access `data`."""
        return self._messages._start_receive(data, self.envelope.source, self.envelope.tag, self._number)


class MessageWork:
    """A send or receive that may still run. It runs on if this is dropped; closing the communicator ends it."""

    def __init__(self, start: StartCall, function: Callable[..., int], call: tuple[Any, ...], data: object) -> None:
        self._function = function
        self._work = start(self._begin, call, _source, data)

    def wait(self, timeout: float | None = None) -> Envelope:
        """Wait until it is done; return what was received, or raise its error. May be called again.

        A wait longer than `timeout` seconds raises CollectiveTimeout and breaks the communicator.
        """
        self._work.wait(timeout)
        message = ffi.new("rc_message *")
        check(lib.rc_work_message(self._native.handle, message))
        return _envelope(message)

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._work.done()

    def cancel(self) -> bool:
        """Withdraw a receive that no message has matched; return whether it is withdrawn. It is done then."""
        cancelled = ffi.new("int *")
        check(lib.rc_cancel(self._native.handle, cancelled))
        return bool(cancelled[0])

    def _begin(self, *call: Any) -> NativeWork:
        slot = ffi.new("rc_work **")
        check(self._function(*call, slot))
        self._native = NativeWork(slot[0])
        return self._native


def _source(source: int) -> int:
    return source


def _envelope(message: Any) -> Envelope:
    return Envelope(message.source, message.tag, message.bytes)


def _memory(data: NDArray[Any], writable: bool) -> tuple[Any, int]:
    """Return a pointer to the bytes of an array, and their number."""
    if data.dtype.hasobject:
        raise refuse("dtype", "one without Python objects", data.dtype)
    try:
        return ffi.from_buffer("char[]", data, writable), data.nbytes
    except (ValueError, BufferError):
        expected = "C-contiguous" if not data.flags.c_contiguous else "a writable one"
        raise refuse("array", expected, f"{data.dtype}, shape {data.shape}, strides {data.strides}") from None
