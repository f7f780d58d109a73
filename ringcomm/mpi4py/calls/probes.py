"""Probes: look for a message without receiving it, or take it for one receive alone."""

from typing import Any, Literal

from ringcomm.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.calls.p2p import match_tag
from ringcomm.mpi4py.groups.context import Context
from ringcomm.mpi4py.requests.message import FROM_PROC_NULL, MESSAGE_NO_PROC, Message, Taken
from ringcomm.mpi4py.requests.operations import fill
from ringcomm.mpi4py.requests.status import Status

__all__ = ["Probes"]


class Probes:
    """The probes of a communicator."""

    _object: Context

    @handled
    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Literal[True]:
        """Wait for a message, without receiving it."""
        tag = match_tag(tag)
        fill(status, FROM_PROC_NULL if source == PROC_NULL else self._object.messages.probe(source, tag))
        return True

    @handled
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether there is a message, without receiving it."""
        tag = match_tag(tag)
        envelope = FROM_PROC_NULL if source == PROC_NULL else self._object.messages.iprobe(source, tag)
        if envelope is None:
            return False
        fill(status, envelope)
        return True

    @handled
    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message and take it: only its Recv can receive it."""
        tag = match_tag(tag)
        return self._taken(None if source == PROC_NULL else self._object.messages.take(source, tag), status)

    @handled
    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Take a message if there is one."""
        tag = match_tag(tag)
        message = None if source == PROC_NULL else self._object.messages.itake(source, tag)
        return None if message is None and source != PROC_NULL else self._taken(message, status)

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    def _taken(self, message: Any, status: Status | None) -> Message:
        """Return the handle of a message; None: one from PROC_NULL."""
        fill(status, FROM_PROC_NULL if message is None else message.envelope)
        return Message(MESSAGE_NO_PROC) if message is None else Message._of(Taken(self._object, message))
