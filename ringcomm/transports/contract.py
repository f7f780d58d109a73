"""The contract of a transport, as types. `ringcomm.testing.check_transport` is the same contract as a test.

A transport moves bytes between the ranks of one group. The communicator checks and shapes the arguments, the transport
does the rest:

- pointers are cdata made by ringcomm.arrays, or `native.NULL`; counts are elements; dtypes and operations have the
  codes of ringcomm.types; timeouts are seconds, negative for the group's own;
- a call returns when this rank's part is done, or raises an error of ringcomm.errors. Nothing is raised while the
  transport can still touch the caller's memory;
- collectives run one at a time, in the order of the calls; point-to-point is independent of them, and ordered per peer
  and tag;
- a rank whose call differs is named on every rank (MismatchError); a late, lost or aborting rank breaks the group: from
  then on every call on every rank raises the first error.

No code outside a transport's own files tests for its class: what differs between transports are the first eight methods
of `Transport`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, Self

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.start_errors import by_rank
from ringcomm.config import Config
from ringcomm.errors import Aborted, MismatchError, RingcommError, encode_error, failure_on, raise_first_failure, refuse
from ringcomm.native import NULL, STATUS, check, ffi, lib
from ringcomm.transports.calls import CollectiveCall, Fused, NativeWork, TransferCall
from ringcomm.transports.fast_path import make_fast_path
from ringcomm.types import COLLECTIVES, DTYPES, PATHS

__all__ = ["LocalTransport", "Transport", "TransportModule"]

REGROUPING = {"shrink": lib.RC_REGROUPING_SHRINK, "grow": lib.RC_REGROUPING_GROW}
# Calls in the flight record of a rank. Shared memory has one entry more, which may be half written.
RECORDED_CALLS = 1023
CALL_BYTES = 256  # of a call in a report, at most
ERROR_BYTES = 960  # of an error as a fact: quoted it takes up to twice as many
FACT_BYTES = 2048  # of a fact in `all_gather_facts`: the same on all ranks, and enough for those that use it


class TransportModule(Protocol):
    """A module or package that `Config(transport=…)` can name: of ringcomm.transports, or by an entry point of another.

    Another package names it in the group "ringcomm.transports" of its entry points.
    """

    NEEDS_STORE: bool  # False: the ranks connect without a store, and `connect` gets None

    def serves(self, place: Place) -> bool:
        """Return whether `connect` can connect the ranks of this job."""
        ...

    def connect(self, rank: int, size: int, store: Any, config: Config) -> "Transport":
        """Connect as `rank` of `size` with the ranks that share `store` (bootstrap.store.Store). Collective."""
        ...


class Transport(ABC):
    """One rank's end of a group: a communicator of the native core.

    A transport gives the first four methods. It overrides the next four where it differs from this class; all others
    are calls of the core.

    Attributes:
        handle: The rc_comm, which messages, traces and GPUs take.
        fused: The collectives, each done in one go, within the timeout.
        timeout: Seconds, of a call that has none of its own.
    """

    def __init__(self, name: str, handle: Any, rank: int, size: int, tuning: Any) -> None:
        self.handle = ffi.gc(handle, lib.rc_free)
        self.tuning = tuning
        self.name, self.rank, self.size = name, rank, size
        self.timeout: float = tuning.timeout
        self.fast_path = make_fast_path(self.handle, rank, size)
        self.fused: Mapping[str, Fused] = {name: self._fused(name) for name in COLLECTIVES}

    @abstractmethod
    def split(self, color: int | None, key: int) -> "Transport | None":
        """Make a group of the ranks with the same color, ordered by key, then rank; None without a color.

        Collective. Closing this group does not affect the new one.
        """

    @abstractmethod
    def shrink(self, timeout: float) -> "tuple[Transport, Sequence[int]]":
        """Make a group of the ranks that call this too, in their old order, although this group is broken.

        Waits `timeout` seconds for ranks that run but do not call it, then leaves them out; returns their process ids,
        too, if the group is of one host. Raises Aborted if the others have continued without this rank.
        """

    @abstractmethod
    def allocate(self, description: str, size: int) -> Any:
        """Return `size` zero bytes that the peers access directly, as a writable buffer that keeps them alive.

        Collective. `description`, that of the user's call, must be the same on every rank (MismatchError). Raises
        MemoryShortage on every rank if one of them has too little.
        """

    @abstractmethod
    def shared_arrays(self) -> AbstractContextManager[None]:
        """Return a block in which NumPy allocates where the peers reach it; if no peer can, it has no effect."""

    @property
    def as_local(self) -> "LocalTransport | None":
        """This transport, if all its ranks share the memory of one machine: then their GPUs may share theirs."""
        return None

    def collective_on_gpus(self, staging: Any, name: str, call: CollectiveCall, timeout: float) -> bool:  # noqa: ARG002 (of those that override it)
        """Do a collective on the GPUs of several hosts, and between the hosts by `staging`, a Staging; wait for it.

        Collective. False: not supported here; nothing was done, and all data has to be staged in host memory.
        """
        return False

    def path(self) -> tuple[str, int]:
        """Return the path of this rank's last collective, and its number of chunks."""
        path, chunks = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_last_path(self.handle, path, chunks))
        return PATHS[path[0]], int(chunks[0])

    def close(self) -> bool:
        """Leave the group. Idempotent; peers that still need this rank raise PeerLost. Then no memory is in use.

        False: this is a signal handler in the middle of a call, which ends first; then close again.
        """
        status = lib.rc_close(self.handle)
        if status != lib.RC_INTERRUPTED:
            check(status)
        return bool(status == lib.RC_OK)

    # --- Calls of the core --------------------------------------------------------------------------------------------

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> NativeWork:
        """Queue `fused[collective](call, timeout)`; the caller keeps the memory alive until it is done."""
        return self._start(lib.rc_collective, COLLECTIVES[collective].code, (call,), timeout)

    def transfer(self, transfer: TransferCall) -> int:
        """Send or receive; return the sender's rank, -1 for a send."""
        message = ffi.new("rc_message *")
        check(lib.rc_transfer_run(self.handle, (transfer,), message))
        return int(message.source)

    def exchange(self, sent: TransferCall, received: TransferCall) -> int:
        """Send and receive at once, so that a ring of such calls cannot deadlock; return the sender's rank."""
        message = ffi.new("rc_message *")
        check(lib.rc_exchange(self.handle, (sent,), (received,), message))
        return int(message.source)

    def start_transfer(self, transfer: TransferCall) -> NativeWork:
        """Start to send or receive; the caller keeps the memory alive until it is done."""
        return self._start(lib.rc_transfer_start, (transfer,))

    def fail(self, error: RingcommError) -> None:
        """Break the group: every call on any rank, waiting or later, raises this error."""
        known = error.rank is not None and not error.group and error.rank < self.size
        text = str(error).replace("\0", "\\0")  # the core takes a C string
        rank = error.rank if known else -1  # of another group: the text says which
        check(lib.rc_abort(self.handle, STATUS[type(error)], rank, text.encode(errors="backslashreplace")))

    def confirm(self, timeout: float) -> None:
        """Before a further part of a call, wait until all ranks have made the part before, the last collective.

        Raises MismatchError if they have called different things; then the call is over on all ranks.
        """
        check(lib.rc_confirm(self.handle, timeout))

    def check(self) -> None:
        """Raise the first failure of the group, if any."""
        check(lib.rc_check(self.handle))

    def check_calls(self) -> None:
        """Raise the mismatch of a call that had returned before it was known, once."""
        check(lib.rc_check_calls(self.handle))

    def check_dropped(self) -> None:
        """Raise the error of a call whose work was dropped, once."""
        check(lib.rc_check_dropped(self.handle))

    def check_before_close(self) -> None:
        """Raise what `close` would, while the flight record can be read, for a dump; nothing if it is closed."""
        for kept in (lib.rc_check_calls, lib.rc_check_dropped):
            status = kept(self.handle)
            check(status if status != lib.RC_CLOSED else lib.RC_OK)

    def lost(self) -> list[int]:
        """Return the ranks that have died or closed."""
        lib.rc_check(self.handle)  # what has come from other hosts
        lost, ranks = ffi.new("int *"), []
        for rank in range(self.size):
            check(lib.rc_peer_lost(self.handle, rank, lost))
            if lost[0] and rank != self.rank:
                ranks.append(rank)
        return ranks

    def report(self, calls: int) -> str:
        """Return the last `calls` (>= 1) calls of every rank, as far as recorded; one line per rank."""
        return self._report(calls, lib.rc_report)

    def rank_reports(self, calls: int) -> list[dict[str, Any]]:
        """Return the same for programs: what rc_report_json writes of each rank."""
        return [json.loads(line) for line in self._report(calls, lib.rc_report_json).splitlines()]

    def _report(self, calls: int, write: Any) -> str:
        calls = min(calls, RECORDED_CALLS)
        most = calls + max(calls, 4) + 1  # done, still running, and the state of the rank
        text = ffi.new("char[]", CALL_BYTES * most * self.size)
        check(write(self.handle, calls, text, len(text)))
        return str(ffi.string(text), errors="replace")

    @contextmanager
    def recorded(self, call: str) -> Iterator[None]:
        """Enter "shrink" or "grow" into the flight record, from the beginning of the block to its end."""
        number = ffi.new("uint64_t *")
        check(lib.rc_regrouping_begin(self.handle, REGROUPING[call], number))
        status = lib.RC_SYSTEM
        try:
            yield
            status = lib.RC_OK
        except KeyboardInterrupt:
            status = lib.RC_INTERRUPTED
            raise
        except RingcommError as error:
            status = STATUS.get(type(error), lib.RC_SYSTEM)
            raise
        finally:
            lib.rc_regrouping_end(self.handle, number[0], status)

    def _start(self, function: Callable[..., int], *call: Any) -> NativeWork:
        slot = ffi.new("rc_work **")
        check(function(self.handle, *call, slot))
        return NativeWork(slot[0])

    def all_gather_facts(self, name: str, fact: Any, timeout: float = -1.0) -> list[Any]:
        """Return the facts of all ranks, which travel as JSON. Collective, under the name of the call that needs it."""
        mine = json.dumps(fact).encode().ljust(FACT_BYTES)
        if len(mine) > FACT_BYTES:
            raise refuse(f"the arguments of {name} as JSON", f"at most {FACT_BYTES} bytes", len(mine))
        facts = bytearray(FACT_BYTES * self.size)
        source, target = ffi.from_buffer(mine), ffi.from_buffer(facts)
        self.fused[name](CollectiveCall(source, target, FACT_BYTES, DTYPES["uint8"]), timeout)
        return [json.loads(facts[at : at + FACT_BYTES]) for at in range(0, len(facts), FACT_BYTES)]

    def _compare_requests(self, description: str) -> None:
        """Raise MismatchError on every rank if the ranks asked `allocate` for different buffers."""
        requests = self.all_gather_facts("empty", description)
        for rank, theirs in enumerate(requests):
            if theirs != requests[0]:
                message = f"the ranks asked for different buffers: {by_rank(requests)}"
                raise MismatchError(message, rank=rank, collective="empty", expected=requests[0], got=theirs)

    def run_on_all(self, name: str, action: Callable[[], Any], timeout: float = -1.0) -> list[Any]:
        """Return the results of `action` on all ranks. If it raises on one, every rank raises. Collective."""
        error: Exception | None = None
        value = None
        try:
            value = action()
        except Exception as raised:  # any: the other ranks wait
            error = raised
        except BaseException as interrupt:
            with suppress(RingcommError):  # of the communicator
                aborted = Aborted(f"rank {self.rank}: {type(interrupt).__name__}", rank=self.rank, collective=name)
                self.all_gather_facts(name, [None, encode_error(aborted)], timeout)
            raise
        failure = encode_error(failure_on(self.rank, error, name), ERROR_BYTES) if error else ""
        outcomes = self.all_gather_facts(name, [value, failure], timeout)
        raise_first_failure((failure for _, failure in outcomes), self.rank, error, name)
        return [value for value, _ in outcomes]

    def _fused(self, name: str) -> Fused:
        run, handle, code = lib.rc_collective, self.handle, COLLECTIVES[name].code

        def collective(call: CollectiveCall, timeout: float) -> None:
            status = run(handle, code, (call,), timeout, NULL)
            if status:
                check(status)

        return collective


class LocalTransport(Transport):
    """A transport whose ranks share the memory of one machine. Groups of GPUs are built on it."""

    @property
    def as_local(self) -> Self:
        return self

    @abstractmethod
    def split(self, color: int | None, key: int) -> "LocalTransport | None": ...

    @abstractmethod
    def reserve_group(self, size: int) -> int:
        """Reserve memory for a group of `size` of these ranks, and return its offset for `open_group`."""

    @abstractmethod
    def open_group(self, offset: int, members: Sequence[int], timeout: float) -> "LocalTransport":
        """Return a group of these ranks, in memory that one of them has reserved. Its failures are its own.

        Unlike `split`, the members alone call it, and none waits for another.
        """
