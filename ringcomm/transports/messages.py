"""Messages as MPI matches them, of host memory: by source and tag, of at most the length of the receive."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from ringcomm.arrays.adapters import CODES
from ringcomm.errors import refuse
from ringcomm.native import check, extension, ffi, lib
from ringcomm.types import DTYPES

__all__ = ["ANY_SOURCE", "ANY_TAG", "Envelope", "MessageWork", "Messages", "TakenMessage"]

ANY_SOURCE = -1
ANY_TAG = -(2**63)  # RC_ANY_TAG, which no message has

for _name in DTYPES:  # the fast path takes arrays of the dtypes that were looked up
    with suppress(TypeError):  # of ml_dtypes
        CODES[np.dtype(_name)]


class Envelope(NamedTuple):
    """What is known of a message beside its bytes. Of no message, as after a send: ANY_SOURCE, ANY_TAG and 0."""

    source: int
    tag: int
    size: int  # bytes


class MessageWork(Protocol):
    """A send or receive that may still run. It runs on if this is dropped; closing the communicator ends it."""

    def wait(self) -> Envelope:
        """Wait until it is done; return what was received, or raise its error. May be called again."""
        ...

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        ...

    def cancel(self) -> bool:
        """Withdraw a receive that no message has matched; return whether it is withdrawn. It is done then."""
        ...


class Messages:
    """Messages of any length, matched as MPI matches them: by source and tag, either of which may be any.

    What is sent is the memory of an object with the buffer protocol: a C-contiguous NumPy array without Python objects,
    bytes. A receive takes the first message that matches, of at most the bytes of its memory. Calls use the timeout of
    the communicator.

    Attributes:
        send: `send(data, peer, tag, synchronous=False)`. A synchronous send returns only once a receive has matched it.
        isend: The same started: a MessageWork. Until it is done, do not write `data`.
        recv: `recv(data, peer, tag)` receives a message into the first bytes of `data`; returns its Envelope.
        irecv: The same started. Until it is done, do not access `data`.
        recv_bytes: `recv_bytes(peer, tag)` receives a message of any length: its bytes, and its Envelope. Where memory
            is short, the message is lost, and its sender done.

    Raises:
        MismatchError: The message that matched a receive is too long. It is lost, its sender is done, and the
            communicator stays usable.
    """

    send: Callable[..., None]
    isend: Callable[..., MessageWork]
    recv: Callable[..., Envelope]
    irecv: Callable[..., MessageWork]
    recv_bytes: Callable[[int, int], tuple[bytes, Envelope]]

    def __init__(self, handle: Any) -> None:
        address = int(ffi.cast("uintptr_t", handle))
        native = extension.Messages(address, handle, check, _refuse, Envelope, extension.MessageWork)
        # Not methods: these calls take tenths of a microsecond.
        self.send, self.isend, self.recv_bytes = native.send, native.isend, native.recv_bytes
        self.recv, self.irecv, self._probe = native.recv, native.irecv, native.probe
        self._handle = handle

    def probe(self, peer: int, tag: int) -> Envelope:
        """Wait for a message that this receive would match; return what is known of it."""
        envelope: Envelope = self._probe(peer, tag, True, False)[0]
        return envelope

    def iprobe(self, peer: int, tag: int) -> Envelope | None:
        """Return what `probe` would return at once, or None."""
        found = self._probe(peer, tag, False, False)
        return None if found is None else found[0]

    def take(self, peer: int, tag: int) -> "TakenMessage":
        """Wait for a message that this receive would match, and set it apart: no other receive gets it."""
        return TakenMessage(self, *self._probe(peer, tag, True, True))

    def itake(self, peer: int, tag: int) -> "TakenMessage | None":
        """Return what `take` would return at once, or None."""
        found = self._probe(peer, tag, False, True)
        return None if found is None else TakenMessage(self, *found)

    def announce_close(self) -> None:
        """Tell the peers that this rank sends no more messages: a peer that waits for one gets PeerLost."""
        check(lib.rc_announce_close(self._handle))


class TakenMessage:
    """A message that has been matched and not received yet. It can be received once."""

    def __init__(self, messages: Messages, envelope: Envelope, number: int) -> None:
        self.envelope = envelope
        self._messages, self._number = messages, number

    def recv(self, data: Any) -> Envelope:
        """Receive the message into the first bytes of `data`."""
        return self._messages.recv(data, self.envelope.source, self.envelope.tag, self._number)

    def irecv(self, data: Any) -> MessageWork:
        """Start `recv`. Until it is done, do not access `data`."""
        return self._messages.irecv(data, self.envelope.source, self.envelope.tag, self._number)


def _refuse(data: Any) -> NoReturn:
    """Raise the error of memory that cannot be sent, or received in."""
    dtype = getattr(data, "dtype", None)
    if dtype is not None and dtype.hasobject:
        raise refuse("dtype", "one without Python objects", dtype)
    if dtype is None:
        raise refuse("array", "a writable, C-contiguous object with the buffer protocol", type(data).__name__)
    expected = "a writable one" if data.flags.c_contiguous else "C-contiguous"
    raise refuse("array", expected, f"{dtype}, shape {data.shape}, strides {data.strides}")
