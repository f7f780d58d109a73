"""SIGINT, SIGTERM and SIGHUP during a measurement: results are kept, and nothing is left behind."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "deferred_signals", "interruptible"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEANUP_SECONDS = 10.0


class Interrupted(KeyboardInterrupt):
    """A signal arrived; `status` is the exit status for it, as a shell reports it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the block on a signal. More signals within CLEANUP_SECONDS are ignored, so that cleanup can
    finish; signals that were ignored before, as under nohup, stay so.
    """
    last = -math.inf

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > CLEANUP_SECONDS:
            last = time.monotonic()
            raise Interrupted(number)

    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    handlers = {each: handler for each, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for each in handlers:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], object]]:
    """Block signals until the end of the block. A process started inside must call the yielded function."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
