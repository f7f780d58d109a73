"""The facts of all ranks of a start: rank 0 collects them from the store, and publishes them as one table.

So the requests to the store grow with the number of ranks, and not with its square, unless a rank is late: then each
rank looks for itself who that is.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from ringcomm.bootstrap.client import ANSWER_TIMEOUT, Client
from ringcomm.bootstrap.session import CONNECTED, connected_key
from ringcomm.bootstrap.start_errors import missing_ranks
from ringcomm.bootstrap.store import Store
from ringcomm.errors import RingcommError, decode_error, encode_error

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
) -> list[Any]:
    """Return the fact of each rank. `name` is for this exchange alone; `meanwhile` is called while this rank waits.

    Raises CollectiveTimeout naming all ranks, or other members, whose facts have not come within `timeout` seconds, and
    what another rank has told the store.
    """
    deadline = time.monotonic() + timeout
    keys, table = [f"{name}/{each}" for each in range(size)], f"{name}/table"

    def find(key: str) -> bytes | None:
        return store.find(key, max(0.0, deadline - time.monotonic()), meanwhile)

    store.set(keys[rank], json.dumps(fact).encode())
    published = find(table) if rank else None
    if published is None:
        found = [find(key) for key in keys]  # on other ranks than 0, to name those that are late
        missing = [other for other, value in enumerate(found) if value is None]
        if rank or missing:
            raise missing_ranks(missing or [0], size, timeout, member, store.members)
        published = b"[" + b",".join(value or b"" for value in found) + b"]"
        store.set(table, published)
    facts: list[Any] = json.loads(published)
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
