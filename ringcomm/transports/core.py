"""Calls of the native core that all transports make."""

from collections.abc import Callable, Sequence
from typing import Any

from ringcomm.callbacks import when_done
from ringcomm.native import check, ffi, lib

__all__ = ["RECORDED_CALLS", "NativeWork", "by_rank", "report"]

# Calls in the flight record of a rank. Shared memory has one entry more, which may be half written.
RECORDED_CALLS = 1023
CALL_BYTES = 256  # of a call in a report, at most


def report(handle: Any, size: int, calls: int, write: Any = lib.rc_report) -> str:
    """Return a line per rank about its last calls: for people, or by `lib.rc_report_json` for programs."""
    calls = min(calls, RECORDED_CALLS)
    most = calls + max(calls, 4) + 1  # done, still running, and the state of the rank
    text = ffi.new("char[]", CALL_BYTES * most * size)
    check(write(handle, calls, text, len(text)))
    return str(ffi.string(text), errors="replace")


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
