"""The facts of all ranks of a start: rank 0 collects them from the store, and publishes them as one table.

So the requests to the store grow with the number of ranks, and not with its square, unless a rank is late: then each
rank looks for itself who that is.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from ringcomm.bootstrap.start_errors import missing_ranks
from ringcomm.bootstrap.store import Store
from ringcomm.errors import CollectiveTimeout

__all__ = ["SLICE", "all_gather_facts"]

SLICE = 0.05  # seconds between two calls of `meanwhile`


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
    deadline = time.monotonic() + timeout
    keys, table = [f"{name}/{each}" for each in range(size)], f"{name}/table"

    def find(key: str) -> bytes | None:
        """Return the value of a key as soon as it is set; None if it is not until the deadline."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait = min(left, SLICE) if meanwhile else left
            try:
                return store.get(key, wait)
            except CollectiveTimeout:
                store.check()  # another rank may have failed
                if wait == left:
                    return None
            if meanwhile:
                meanwhile()

    def collect() -> list[bytes]:
        found = [find(key) for key in keys]
        if missing := [other for other, value in enumerate(found) if value is None]:
            raise missing_ranks(missing, size, timeout, members=store.members)
        return [value for value in found if value is not None]

    store.set(keys[rank], json.dumps(fact).encode())
    if rank == 0:
        store.set(table, b"[" + b",".join(collect()) + b"]")
    published = find(table)
    if published is None:
        collect()  # names the ranks that are late
        raise missing_ranks([0], size, timeout, members=store.members)
    found: list[Any] = json.loads(published)
    return found
