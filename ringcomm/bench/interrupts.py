"""What ends a measurement before its time: Ctrl-C, SIGTERM and SIGHUP alike, so that nothing is lost or left behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "interruptible"]

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal has come; `status` is what the shell makes of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals raise Interrupted inside. One that is ignored stays so: under nohup it goes on."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    heard = [number for number in ENDS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
