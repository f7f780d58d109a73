"""Agreement on a name that is unique to one start of the ranks of a group, through torch's store.

The store may hold keys of earlier starts: torch reuses the names of groups after destroy_process_group, and torchrun
the whole store after a restart. So each rank picks a random name, and rank 0 answers each name until all ranks have
acknowledged: no old key can be mistaken for an answer.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from ringcomm.bootstrap.place import host_id
from ringcomm.bootstrap.process_watch import ProcessWatch, process_id
from ringcomm.bootstrap.start_errors import missing_ranks

__all__ = ["NameAgreement", "wait_briefly"]

Store = Any  # of torch

SLICE = 0.1  # seconds between checks for failures and signals


class NameAgreement:
    """One rank's part in it. It watches the processes of this host that announce themselves.

    Attributes:
        name: this rank's random name; that of rank 0 becomes the name of the start
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, watch: ProcessWatch) -> None:
        self._store, self._rank, self._size, self._watch = store, rank, size, watch
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._known: dict[int, bytes] = {}  # what other ranks have announced last
        self.name = secrets.token_hex(8)
        store.set(f"{rank} is", f"{self.name} {host_id()}\n{process_id()}")

    def lead(self) -> str:
        """Return the name of rank 0, once all ranks have acknowledged it."""
        missing, pauses = set(range(1, self._size)), _pauses()
        while missing := {other for other in missing if not self._has_acknowledged(other)}:
            self._check(missing)
            time.sleep(next(pauses))
        return self.name

    def follow(self) -> str:
        """Return the name of rank 0, and acknowledge it."""
        while not wait_briefly(self._store, key := f"start of {self._rank}, {self.name}", self._deadline):
            self._announcement(0)
            self._check({0})
        self._announcement(0)
        start: str = self._store.get(key).decode()
        self._store.set(f"{self._rank} acknowledged {start}", b"")
        return start

    def _has_acknowledged(self, other: int) -> bool:
        """Answer another rank if its name is new; return whether it has acknowledged an earlier answer."""
        if name := self._announcement(other):
            self._store.set(f"start of {other}, {name}", self.name)
            return False
        return other in self._known and bool(self._store.check([f"{other} acknowledged {self.name}"]))

    def _announcement(self, other: int) -> str | None:
        """Return the name of another rank if it is new, and watch its process."""
        found: bytes = self._store.get(key) if self._store.check([key := f"{other} is"]) else b""
        if found in (b"", self._known.get(other)):
            return None
        self._known[other] = found
        name, _, place = found.decode().partition(" ")
        host, _, process = place.partition("\n")
        if host == host_id():
            self._watch.add(other, process, now=False)
        return name

    def _check(self, missing: set[int]) -> None:
        """Raise if a process has died, or the time is up."""
        self._watch.check()
        if time.monotonic() >= self._deadline:
            raise missing_ranks(missing, self._size, self._timeout)


def wait_briefly(store: Store, key: str, deadline: float) -> bool:
    """Wait up to a slice for a key; return whether it is set. torch's own wait ignores signals, and logs."""
    deadline = min(deadline, time.monotonic() + SLICE)
    pauses = _pauses()
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(next(pauses))
    return True


def _pauses() -> Iterator[float]:
    """Return the seconds to sleep between two looks at the store: so no wait takes much longer than it must."""
    pause = 0.0001  # as long as a look takes
    while True:
        yield pause
        pause = min(1.5 * pause, 0.02)
