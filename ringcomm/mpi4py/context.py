"""What the handles of a communicator share."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ringcomm.communicator import Communicator
from ringcomm.errors import RingcommError
from ringcomm.mpi4py import errors
from ringcomm.mpi4py.constants import BUFFER_AUTOMATIC
from ringcomm.mpi4py.errors import Errhandler
from ringcomm.mpi4py.topology import Topology

__all__ = ["KINDS", "NULL", "OPEN", "BufferedSends", "Context"]

KINDS: dict[type, Any] = {}  # the class of handles for each kind of topology
OPEN: set[Context] = set()  # kept until Free or Finalize, as in MPI, where dropping a handle frees nothing


class Context:
    """What the handles of a communicator share: ringcomm's communicator, and what MPI adds to it.

    Attributes:
        ranks: The ranks of the world, in the order of this communicator.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], parent: Context | None = None) -> None:
        self.comm, self.fast, self.messages = comm, comm._fast_path, comm.messages
        self.rank, self.size = comm.rank, comm.size
        self.ranks = tuple(ranks)
        self.name = ""
        self.attributes: dict[int, Any] = {}
        self.errhandler: Errhandler = errors.ERRORS_RETURN if parent is None else parent.errhandler
        self.info: dict[str, str] = {}
        self.topology: Topology | None = None
        self.universe: int = self.size if parent is None else parent.universe
        self.predefined = False  # COMM_WORLD and COMM_SELF, which cannot be freed
        self.buffered = BufferedSends()
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        OPEN.add(self)

    def fail(self, error: RingcommError) -> NoReturn:
        """Raise an error of ringcomm as one of MPI, or do what the error handler says."""
        raised = errors.translate(error)
        self.handle_error(raised)
        raise raised from error

    def handle_error(self, error: errors.Exception) -> None:
        if self.errhandler in (errors.ERRORS_ARE_FATAL, errors.ERRORS_ABORT):
            self.abort(error.Get_error_code(), str(error))
        function = self.errhandler._object and self.errhandler._object.function
        if function:
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

    def close(self) -> None:
        """Leave the communicator, after all buffered sends. Other pending operations end with an error."""
        with suppress(RingcommError):
            self.buffered.flush()
            self.comm.barrier()
        with suppress(RingcommError):
            self.comm.close()
        OPEN.discard(self)


class NullContext:
    """Stands for the communicator of a null handle."""

    def __getattr__(self, name: str) -> NoReturn:
        raise errors.Exception(errors.ERR_COMM)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise errors.Exception(errors.ERR_COMM)


NULL = NullContext()


class BufferedSends:
    """The sends of Bsend that may still run, and the memory that the program has attached for them."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._memory: Any = None

    def add(self, work: Any) -> None:
        self._works = [each for each in self._works if not each.done()]
        self._works.append(work)

    def attach(self, memory: Any) -> None:
        """Remember the memory for `detach`. It is not needed: each send has memory of its own."""
        if self._memory is not None:
            raise errors.Exception(errors.ERR_BUFFER)
        self._memory = BUFFER_AUTOMATIC if memory is None else memory

    def detach(self) -> Any:
        self.flush()
        memory, self._memory = self._memory, None
        return memory

    def flush(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
