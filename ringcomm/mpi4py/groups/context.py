"""What the handles of a communicator share."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ringcomm.communicator import Communicator
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.mpi4py.base import errors
from ringcomm.mpi4py.base.errhandler import ERRORS_ABORT, ERRORS_ARE_FATAL, ERRORS_RETURN, Errhandler
from ringcomm.mpi4py.groups.topology import Topology
from ringcomm.mpi4py.requests.buffered import BufferedSends
from ringcomm.mpi4py.requests.operations import PendingOperation
from ringcomm.mpi4py.requests.request import Request
from ringcomm.transports.requests import RequestMaker, fast_path_with

__all__ = ["KINDS", "NULL", "OPEN", "TIMEOUT", "Context", "announce_end", "close_all"]

TIMEOUT = 30 * 24 * 3600.0  # seconds: MPI programs wait as long as they like; a dead rank is reported at once

KINDS: dict[type, Any] = {}  # the class of handles for each kind of topology
OPEN: set[Context] = set()  # kept until Free or Finalize, as in MPI, where dropping a handle frees nothing
_freed: set[Context] = set()  # until all ranks have freed them


class Context:
    """What the handles of a communicator share: ringcomm's communicator, and what MPI adds to it.

    Attributes:
        ranks: The ranks of the world, in the order of this communicator.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], parent: Context | None = None) -> None:
        self.comm, self.messages = comm, comm.messages
        this = weakref.ref(self)  # the fast path takes no part in garbage collection
        self.fast = fast_path_with(lambda error: _fail(this, error), comm._transport.handle, comm.rank, comm.size)
        self.requests = RequestMaker(self.fast, PendingOperation, Request)
        self.rank, self.size = comm.rank, comm.size
        self.ranks = tuple(ranks)
        self.name = ""
        self.attributes: dict[int, Any] = {}
        self.errhandler: Errhandler = ERRORS_RETURN if parent is None else parent.errhandler
        self.info: dict[str, str] = {}
        self.topology: Topology | None = None
        self.universe: int = self.size if parent is None else parent.universe
        self.predefined = False  # COMM_WORLD and COMM_SELF, which cannot be freed
        self.buffered = BufferedSends()
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.inner: Context | None = None  # for the calls that are made of messages
        OPEN.add(self)

    def check_root(self, root: int) -> int:
        """Return the root, which must be a rank."""
        if not 0 <= root < self.size:
            raise errors.failure(errors.ERR_ROOT, f"root: expected a rank from 0 to {self.size - 1}, got {root}")
        return root

    def fail(self, error: RingcommError | errors.Exception) -> NoReturn:
        """Do what the error handler says, then raise the error as one of MPI.

        Every error of a call on the communicator passes here; that of a call inside another one passes twice.
        """
        raised = errors.translate(error) if isinstance(error, RingcommError) else error
        if not raised.handled:
            raised.handled = True
            self.handle_error(raised)
        raise raised from raised.__cause__  # without the error of ringcomm, whose text it has

    def handle_error(self, error: errors.Exception) -> None:
        """Do what the error handler says."""
        if self.errhandler in (ERRORS_ARE_FATAL, ERRORS_ABORT):
            self.abort(error.Get_error_code(), str(error))
        if function := self.errhandler.function:
            function(self.handle(), error.Get_error_code())

    def handle(self) -> Any:
        """Return a new handle."""
        return KINDS[type(self.topology)]._of(self)

    def abort(self, code: int, why: str) -> NoReturn:
        """End this process, and abort every communicator that it has: that of the world reaches all ranks."""
        for context in tuple(OPEN):
            with suppress(RingcommError):  # broken already
                context.comm.abort(why)
        sys.stdout.flush()
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(code & 0xFF or 1)

    def free(self) -> None:
        """Free the communicator, without waiting for the other ranks, which may free several in another order.

        It closes once all ranks have freed it and its requests are done or dropped: a message to a rank that has freed
        it earlier is no error.
        """
        if self.inner:
            self.inner.free()
        OPEN.discard(self)
        with suppress(RingcommError):  # broken: nobody waits for this rank
            work = self.comm._await_close(TIMEOUT)
            _freed.add(self)
            work.add_done_callback(lambda _: self._forget())

    def _forget(self) -> None:
        with suppress(RingcommError):
            self.buffered.flush()
        _freed.discard(self)


def _fail(context: weakref.ref[Context], error: RingcommError) -> NoReturn:
    found = context()
    if found is None:  # of a call that outlives the communicator
        raise errors.translate(error)
    found.fail(error)


def announce_end() -> None:
    """Tell the other ranks that this one sends nothing more, also on communicators that they have not freed yet."""
    for context in (*OPEN, *_freed):
        with suppress(RingcommError):  # broken
            context.messages.announce_close()


def close_all() -> None:
    """Close every communicator. Then raise the first mismatch of a request that was dropped."""
    mismatch: tuple[Context, MismatchError] | None = None
    for context in (*OPEN, *_freed):
        try:
            context.comm.close()
        except MismatchError as error:
            mismatch = mismatch or (context, error)
        except RingcommError:  # broken
            pass
    OPEN.clear()
    _freed.clear()
    if mismatch:
        context, failure = mismatch
        context.fail(failure)


class NullContext:
    """Stands for the communicator of a null handle."""

    def fail(self, error: RingcommError | errors.Exception) -> NoReturn:
        """Raise the error of a method that has used this."""
        raise error

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # of an inspection of the class
            raise AttributeError(name)
        raise null_handle()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise null_handle()


def null_handle() -> errors.Exception:
    """Return the error of a call on a null handle."""
    return errors.failure(errors.ERR_COMM, "expected a communicator, got COMM_NULL, or one that was freed")


NULL = NullContext()
