"""The facts of all ranks of a start: rank 0 collects them from the store, and publishes them as one table.

So the requests to the store grow with the number of ranks, and not with its square, unless a rank is late: then each
rank looks for itself who that is.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any

from ringcomm.bootstrap.client import ANSWER_TIMEOUT, Client
from ringcomm.bootstrap.session import CONNECTED, connected_key
from ringcomm.bootstrap.start_errors import missing_ranks
from ringcomm.bootstrap.store import Store
from ringcomm.errors import CollectiveTimeout, RingcommError, decode_error, encode_error

__all__ = ["all_gather_facts", "confirm"]


def all_gather_facts(
    store: Store,
    name: str,
    rank: int,
    size: int,
    fact: Any,
    timeout: float,
    meanwhile: Callable[[], object] | None = None,
    member: str = "rank",
    late: Callable[[CollectiveTimeout], object] | None = None,
    late_after: float = math.inf,
) -> list[Any]:
    """Return the fact of each rank. `name` is for this exchange alone; `meanwhile` is called while this rank waits.

    Raises CollectiveTimeout naming all ranks, or other members, whose facts have not come within `timeout` seconds, and
    what another rank has told the store. `late` is called with such an error if some are missing after `late_after`
    seconds; this rank goes on waiting then.
    """
    begin = time.monotonic()
    keys, table = [f"{name}/{each}" for each in range(size)], f"{name}/table"

    def collect(seconds: float) -> bytes | CollectiveTimeout:
        """Return the table, or the error that names whose facts have not come within so many seconds."""

        def find(key: str) -> bytes | None:
            return store.find(key, max(0.0, begin + seconds - time.monotonic()), meanwhile)

        if rank and (published := find(table)) is not None:
            return published
        found = [find(key) for key in keys]  # on other ranks than 0, to name those that are late
        missing = [other for other, value in enumerate(found) if value is None]
        if rank or missing:
            return missing_ranks(missing or [0], size, seconds, member, store.members)
        published = b"[" + b",".join(value or b"" for value in found) + b"]"
        store.set(table, published)
        return published

    store.set(keys[rank], json.dumps(fact).encode())
    result = collect(min(late_after, timeout))
    if late and late_after < timeout and isinstance(result, CollectiveTimeout):
        late(result)
        result = collect(timeout)
    if isinstance(result, CollectiveTimeout):
        raise result
    facts: list[Any] = json.loads(result)
    return facts


def confirm(client: Client, start: str, store: Store, rank: int, size: int, timeout: float) -> None:
    """Return on all ranks of a start, once all have connected, or raise on all.

    A rank may be lost when some have heard from all, and others have not: the first to say so, in a session that
    outlasts the start, decides for all. What it has failed with is the error of all.
    """
    decision = CONNECTED
    try:
        all_gather_facts(store, "connected", rank, size, None, timeout)
    except RingcommError as error:
        decision = encode_error(error).encode()
    client.tell("propose", decision, key=connected_key(start))
    decision = client.ask("get", ANSWER_TIMEOUT, key=connected_key(start), wait=True).payload
    if decision != CONNECTED:
        raise decode_error(decision)
