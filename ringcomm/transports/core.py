"""What all transports of the native core have in common: calls on a communicator of ringcomm.h."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ringcomm.arrays.adapters import CODES, TENSORS
from ringcomm.callbacks import when_done
from ringcomm.errors import MismatchError, RingcommError, describe_error, raise_first_failure, refuse
from ringcomm.native import NULL, STATUS, NativeFastPath, check, ffi, lib
from ringcomm.transports.contract import RECORDED_CALLS, CollectiveCall, FastPath, Fused, TransferCall
from ringcomm.types import COLLECTIVES, DTYPES, OPS, PATHS
from ringcomm.work import StartedWork

__all__ = ["NativeTransport", "NativeWork", "by_rank", "make_fast_path"]

REGROUPING = {"shrink": lib.RC_REGROUPING_SHRINK, "grow": lib.RC_REGROUPING_GROW}
FACT_BYTES = 2048  # of a fact in `all_gather_facts`: the same on all ranks, and enough for those that use it
CALL_BYTES = 256  # of a call in a report, at most


def report(handle: Any, size: int, calls: int, write: Any = lib.rc_report) -> str:
    """Return a line per rank about its last calls: for people, or by `lib.rc_report_json` for programs."""
    calls = min(calls, RECORDED_CALLS)
    most = calls + max(calls, 4) + 1  # done, still running, and the state of the rank
    text = ffi.new("char[]", CALL_BYTES * most * size)
    check(write(handle, calls, text, len(text)))
    return str(ffi.string(text), errors="replace")


class NativeTransport:
    """One rank's end of a communicator of the native core."""

    def __init__(self, name: str, handle: Any, rank: int, size: int, tuning: Any) -> None:
        self.handle = ffi.gc(handle, lib.rc_free)
        self.tuning = tuning
        self.name, self.rank, self.size = name, rank, size
        self.timeout: float = tuning.timeout
        self.fast_path = make_fast_path(self.handle, rank, size)
        self.fused: Mapping[str, Fused] = {name: self._fused(name) for name in COLLECTIVES}
        self.left_out_pids: Sequence[int] = ()

    def start(self, collective: str, call: CollectiveCall, timeout: float) -> "NativeWork":
        return self._start(lib.rc_collective, COLLECTIVES[collective].code, (call,), timeout)

    def transfer(self, transfer: TransferCall) -> int:
        message = ffi.new("rc_message *")
        check(lib.rc_transfer_run(self.handle, (transfer,), message))
        return int(message.source)

    def exchange(self, sent: TransferCall, received: TransferCall) -> int:
        message = ffi.new("rc_message *")
        check(lib.rc_exchange(self.handle, (sent,), (received,), message))
        return int(message.source)

    def start_transfer(self, transfer: TransferCall) -> "NativeWork":
        return self._start(lib.rc_transfer_start, (transfer,))

    def collective_on_gpus(self, *_: Any) -> bool:
        return False

    def fail(self, error: RingcommError) -> None:
        known = error.rank is not None and not error.group and error.rank < self.size
        text = str(error).replace("\0", "\\0")  # the core takes a C string
        rank = error.rank if known else -1  # of another group: the text says which
        check(lib.rc_abort(self.handle, STATUS[type(error)], rank, text.encode(errors="backslashreplace")))

    def close(self) -> bool:
        status = lib.rc_close(self.handle)
        if status != lib.RC_INTERRUPTED:
            check(status)
        return bool(status == lib.RC_OK)

    def check(self) -> None:
        check(lib.rc_check(self.handle))
        check(lib.rc_check_calls(self.handle))

    def lost(self) -> list[int]:
        """Return the ranks that have died or closed."""
        lib.rc_check(self.handle)  # what has come from other hosts
        lost, ranks = ffi.new("int *"), []
        for rank in range(self.size):
            check(lib.rc_peer_lost(self.handle, rank, lost))
            if lost[0] and rank != self.rank:
                ranks.append(rank)
        return ranks

    def path(self) -> tuple[str, int]:
        path, chunks = ffi.new("int *"), ffi.new("uint64_t *")
        check(lib.rc_last_path(self.handle, path, chunks))
        return PATHS[path[0]], int(chunks[0])

    def report(self, calls: int) -> str:
        return report(self.handle, self.size, calls)

    @contextmanager
    def recorded(self, call: str) -> Iterator[None]:
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

    def _start(self, function: Callable[..., int], *call: Any) -> "NativeWork":
        slot = ffi.new("rc_work **")
        check(function(self.handle, *call, slot))
        return NativeWork(slot[0])

    def all_gather_facts(self, name: str, fact: Any, timeout: float = -1.0) -> list[Any]:
        """Return the facts of all ranks, under the name of the call that needs them."""
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
        """Return the results of `action` on all ranks. If it raises on one, every rank raises."""
        error: Exception | None = None
        value = None
        try:
            value = action()
        except Exception as raised:  # any: the other ranks wait
            error = raised
        except BaseException as interrupt:
            with suppress(RingcommError):  # of the communicator
                self.all_gather_facts(name, [None, f"Aborted: {type(interrupt).__name__}"], timeout)
            raise
        failure = describe_error(error).encode("ascii", "replace").decode()[:300]
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


def make_fast_path(handle: Any, rank: int, size: int, check: Callable[[int], None] = check) -> FastPath:
    """Return the fast path of a communicator; `check` raises the error behind a status."""
    address, ops = int(ffi.cast("uintptr_t", handle)), {op: code for op, (code, _) in OPS.items()}
    made: FastPath = NativeFastPath(address, handle, check, TENSORS, CODES, ops, rank, size, StartedWork)
    return made


class NativeWork:
    """A call queued in the native core."""

    def __init__(self, handle: Any) -> None:
        self.handle = ffi.gc(handle, lib.rc_work_free)

    def wait(self, timeout: float) -> int:
        source = ffi.new("int *", -1)
        check(lib.rc_work_wait(self.handle, timeout, source))
        return int(source[0])

    def done(self) -> bool:
        return bool(lib.rc_work_done(self.handle))

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        when_done(self.handle, callback)


def by_rank(values: Sequence[str], member: str = "rank", members: Sequence[int] = ()) -> str:
    """Describe which ranks have which value; `members`: their ranks in the job: see start_errors.py."""
    numbers = members or range(len(values))
    ranks = {value: [n for n, other in zip(numbers, values, strict=True) if other == value] for value in values}
    return "; ".join(f"{value} on {member} {', '.join(map(str, where))}" for value, where in ranks.items())
