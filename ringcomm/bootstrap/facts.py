"""The facts of all ranks of a start: rank 0 collects them from the store, and publishes them as one table.

So the requests to the store grow with the number of ranks, and not with its square, unless a rank is late: then each
rank looks for itself who that is.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from ringcomm.bootstrap.arrivals import arrival_timeout
from ringcomm.bootstrap.store import Store
from ringcomm.bootstrap.wire.framing import MESSAGE_BYTES
from ringcomm.errors import CollectiveTimeout

__all__ = ["SLICE", "all_gather_facts"]

SLICE = 0.05  # seconds between two calls of `meanwhile`
PIECE = MESSAGE_BYTES - 256  # bytes of the table in one message, beside its key


def all_gather_facts(
    store: Store,
    name: str,
    rank: int,
    size: int,
    fact: Any,
    timeout: float,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Return the fact of each rank. `name` is for this exchange alone; `meanwhile` is called while this rank waits.

    Raises CollectiveTimeout naming all ranks whose facts have not come within `timeout` seconds, and what another rank
    has told the store.
    """
    facts = _Facts(store, name, size, timeout, meanwhile)
    store.set(f"{name}/{rank}", json.dumps(fact).encode())
    if rank == 0:
        facts.publish()
    found: list[Any] = json.loads(facts.table())
    return found


class _Facts:
    def __init__(
        self, store: Store, name: str, size: int, timeout: float, meanwhile: Callable[[], object] | None
    ) -> None:
        self._store, self._name, self._size, self._timeout = store, name, size, timeout
        self._deadline = time.monotonic() + timeout
        self._meanwhile = meanwhile

    def publish(self) -> None:
        table = b"[" + b",".join(self._collect()) + b"]"
        pieces = [table[begin : begin + PIECE] for begin in range(0, len(table), PIECE)]
        for i, piece in reversed([*enumerate(pieces)]):  # who finds the first finds all
            self._store.set(f"{self._name}/table/{i}", f"{len(pieces)}\n".encode() + piece)

    def table(self) -> bytes:
        first = self._find(f"{self._name}/table/0")
        if first is None:
            self._collect()  # names the ranks that are late
            raise arrival_timeout([0], self._size, self._timeout, members=self._store.members)
        count, _, piece = first.partition(b"\n")
        pieces = [piece]
        for i in range(1, int(count)):
            pieces.append(self._store.get(f"{self._name}/table/{i}", self._timeout).partition(b"\n")[2])
        return b"".join(pieces)

    def _collect(self) -> list[bytes]:
        found = [self._find(f"{self._name}/{rank}") for rank in range(self._size)]
        if missing := [rank for rank, fact in enumerate(found) if fact is None]:
            raise arrival_timeout(missing, self._size, self._timeout, members=self._store.members)
        return [fact for fact in found if fact is not None]

    def _find(self, key: str) -> bytes | None:
        """Return the value of a key as soon as it is set; None if it is not until the deadline."""
        while True:
            left = max(0.0, self._deadline - time.monotonic())
            wait = min(left, SLICE) if self._meanwhile else left
            try:
                return self._store.get(key, wait)
            except CollectiveTimeout:
                self._store.check()  # another rank may have failed
                if wait == left:
                    return None
            if self._meanwhile:
                self._meanwhile()
