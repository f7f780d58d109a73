"""Start threads and processes: if the system refuses one, the error says which, and which limits there are."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ringcomm.errors import RingcommError

__all__ = ["OwnedLock", "start_thread", "starting"]


@contextmanager
def starting(what: str, calls: str = "fork") -> Iterator[None]:
    """Raise RingcommError, which names `what`, if the system refuses the thread or process that the body starts.

    `calls`: the system calls that start it.
    """
    try:
        yield
    except RingcommError:  # of what the body has started by itself
        raise
    except (OSError, RuntimeError) as error:  # of a process; of a thread
        if isinstance(error, PermissionError) and error.filename is None:  # else of the program
            raise RingcommError(f"cannot start {what}: the system denies {calls} ({error.strerror})") from error
        if isinstance(error, OSError) and error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        reason = getattr(error, "strerror", None) or error
        limits = "threads and processes (RLIMIT_NPROC, pids.max of the control group) or memory (RLIMIT_AS)"
        raise RingcommError(f"cannot start {what} ({reason}): raise the limit on {limits}") from error


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with starting(f"the thread {name!r}"):
        thread.start()
    return thread


class OwnedLock:
    """A lock that knows which thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()

    def here(self) -> bool:
        """Return whether this thread holds it: then this is a signal handler that has interrupted the holder."""
        return self._owner == threading.get_ident()
