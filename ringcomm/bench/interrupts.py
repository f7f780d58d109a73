"""What ends a measurement before its time: Ctrl-C, SIGTERM and SIGHUP alike, so that nothing is lost or left behind."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "interruptible", "uninterrupted"]

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SOON = 10.0  # seconds, in which all can be put away


class Interrupted(KeyboardInterrupt):
    """A signal has come; `status` is what the shell makes of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise Interrupted inside; those that follow soon are not heard, so that all can be put away.

    One that is ignored stays so: under nohup it goes on.
    """
    heard = -math.inf

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal heard
        if time.monotonic() - heard > SOON:
            heard = time.monotonic()
            raise Interrupted(number)

    before = {each: signal.getsignal(each) for each in ENDS}
    before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for each in before:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def uninterrupted() -> Iterator[Callable[[], object]]:
    """Let signals wait until the end of the block. A process that is started inside has to call what this yields."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
