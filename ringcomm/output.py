"""What the ranks of `ringcomm run` print: whole lines, each under its rank."""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO

__all__ = ["Lines", "Printer"]

LINE_BYTES = 1 << 20  # a longer line is printed in pieces
MOST_BYTES = 1 << 20  # to be printed; when there are more, nothing is read from the ranks


class Printer:
    """Prints on a thread of its own: while nobody reads what is printed, only that thread waits."""

    def __init__(self, news: Callable[[], object]) -> None:
        """`news` is called, on that thread, whenever something was printed, or cannot be."""
        self._news = news
        self._texts: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._given = self._printed = 0  # bytes
        self._failure: OSError | None = None
        threading.Thread(target=self._run, name="ringcomm output", daemon=True).start()

    @property
    def full(self) -> bool:
        return self._given - self._printed > MOST_BYTES

    @property
    def done(self) -> bool:
        return self._given == self._printed

    def print(self, descriptor: int, text: bytes) -> None:
        self._given += len(text)
        self._texts.put((descriptor, text))

    def check(self) -> None:
        """Raise what has kept something from being printed, such as BrokenPipeError."""
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        while not self._failure:
            descriptor, text = self._texts.get()
            rest = memoryview(text)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                self._printed += len(text)
            except OSError as error:
                self._failure = error
            self._news()


class Lines:
    """One output of one rank, which is printed by whole lines under its rank."""

    def __init__(self, rank: int, source: IO[bytes], printer: Printer, descriptor: int) -> None:
        self._prefix = b"[%d] " % rank
        self._source = source
        self._printer = printer
        self._descriptor = descriptor
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
            self._printer.print(self._descriptor, b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)
