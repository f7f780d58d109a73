"""What the ranks of `ringcomm run` print: whole lines, each under its rank."""

import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO

__all__ = ["Lines", "Printer"]

LINE_BYTES = 1 << 20  # a longer line is printed in pieces
MOST_BYTES = 1 << 20  # to be printed; while there are more, nothing is read from the ranks
PIECE_BYTES = 1 << 16  # that are written at once: what is written later is progress


class Printer:
    """Prints on a thread of its own: while nobody reads what is printed, only that thread waits."""

    def __init__(self, descriptor: int, news: Callable[[], object]) -> None:
        """`news` is called, on that thread, when there is room again, all is printed, or nothing can be."""
        self._descriptor, self._news = descriptor, news
        self._texts: SimpleQueue[bytes] = SimpleQueue()
        self._given = 0  # bytes
        self._failure: OSError | None = None
        self.printed = 0  # bytes
        self._thread = threading.Thread(target=self._run, name="ringcomm output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._given - self.printed > MOST_BYTES

    @property
    def done(self) -> bool:
        return self._given == self.printed

    def print(self, text: bytes) -> None:
        self._given += len(text)
        self._texts.put(text)

    def check(self) -> None:
        """Raise what has kept something from being printed, such as BrokenPipeError."""
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """End the thread, unless nobody reads."""
        self._texts.put(b"")
        if self.done:
            self._thread.join()

    def _run(self) -> None:
        try:
            while text := self._texts.get():
                rest = memoryview(text)
                while rest:
                    try:
                        written = os.write(self._descriptor, rest[:PIECE_BYTES])
                    except BlockingIOError:  # whoever opened it has made it so for all
                        select.select([], [self._descriptor], [])
                        continue
                    rest = rest[written:]
                    was_full = self.full
                    self.printed += written
                    if self.done or (was_full and not self.full):
                        self._news()
        except OSError as error:
            self._failure = error
            self._news()


class Lines:
    """One output of one rank, which is printed by whole lines under its rank."""

    def __init__(self, rank: int, source: IO[bytes], printer: Printer) -> None:
        self._prefix = b"[%d] " % rank
        self._source = source
        self._printer = printer
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def print(self) -> bool:
        """Print what can be read now; False when there is no more."""
        try:
            data = os.read(self._source.fileno(), LINE_BYTES)
        except BlockingIOError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._printer.print(b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)
