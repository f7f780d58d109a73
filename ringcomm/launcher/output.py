"""The output of the ranks of `ringcomm run`: whole lines, each prefixed with its rank."""

import os
import select
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO

from ringcomm.machine.threads import start_thread

__all__ = ["OutputWriter", "RankOutput"]

LINE_BYTES = 1 << 20  # a longer line is split
QUEUE_BYTES = 1 << 20  # while more are queued, nothing is read from the ranks
WRITE_BYTES = 1 << 16  # per write(), so that a slow reader still shows progress


class OutputWriter:
    """Writes on its own thread, so that a reader that does not read blocks only that thread."""

    def __init__(self, descriptor: int, notify: Callable[[], object]) -> None:
        """`notify` is called on that thread when the queue has room again, is empty, or cannot be written."""
        self._descriptor, self._notify = descriptor, notify
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._queued = 0  # bytes
        self._failure: OSError | None = None
        self.written = 0  # bytes
        self._thread = start_thread("ringcomm output", self._run)

    @property
    def full(self) -> bool:
        return self._queued - self.written > QUEUE_BYTES

    @property
    def done(self) -> bool:
        return self._queued == self.written

    def write(self, text: bytes) -> None:
        self._queued += len(text)
        self._queue.put(text)

    def check(self) -> None:
        """Raise the error of a failed write, for example BrokenPipeError."""
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """End the thread, unless a write blocks it."""
        self._queue.put(b"")
        if self.done:
            self._thread.join()

    def _run(self) -> None:
        try:
            while text := self._queue.get():
                rest = memoryview(text)
                while rest:
                    try:
                        count = os.write(self._descriptor, rest[:WRITE_BYTES])
                    except BlockingIOError:  # O_NONBLOCK is shared with the process that opened the file
                        select.select([], [self._descriptor], [])
                        continue
                    rest = rest[count:]
                    was_full = self.full
                    self.written += count
                    if self.done or (was_full and not self.full):
                        self._notify()
        except OSError as error:
            self._failure = error
            self._notify()


class RankOutput:
    """stdout or stderr of one rank."""

    def __init__(self, rank: int, source: IO[bytes], writer: OutputWriter) -> None:
        self._prefix = b"[%d] " % rank
        self._source = source
        self._writer = writer
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def forward(self) -> bool:
        """Forward the available whole lines; return False at the end of the output."""
        try:
            data = os.read(self._source.fileno(), LINE_BYTES)
        except BlockingIOError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._writer.write(b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)

    def close(self) -> None:
        self._source.close()
