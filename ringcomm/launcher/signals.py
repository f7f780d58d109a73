"""Signals of this process as something to wait for, beside sockets and pipes."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

__all__ = ["SignalSocket"]


class SignalSocket:
    """A socket that becomes readable when a signal arrives, or another thread calls `wake`."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._received: list[int] = []
        self._signals = signals

    def __enter__(self) -> Self:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        # A full socket drops bytes, so the handlers record the signals too.
        self._before = {each: signal.signal(each, lambda it, _: self._received.append(it)) for each in self._signals}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)  # a parent may block them
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # it is full, hence readable, or closed
            self._sender.send(b"\0")

    @contextmanager
    def mask_for_children(self, *blocked: signal.Signals) -> Iterator[None]:
        """Block what was blocked before, and `blocked`, in the body: the processes that it starts inherit that."""
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, {*self._mask, *blocked})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def mask(self) -> set[int]:
        """The signals that were blocked before."""
        return {*self._mask}

    def read(self) -> list[int]:
        """Return the signals received since the last call."""
        with suppress(BlockingIOError):
            self._receiver.recv(4096)
        received, self._received = self._received, []
        return received
