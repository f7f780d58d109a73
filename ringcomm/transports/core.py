"""Calls of the native core that all transports make."""

from collections.abc import Callable, Sequence
from typing import Any

from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.callbacks import when_done
from ringcomm.native import check, ffi, lib

__all__ = ["NativeWork", "by_rank"]


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
    return "; ".join(f"{value} on {format_ranks(where, member)}" for value, where in ranks.items())
