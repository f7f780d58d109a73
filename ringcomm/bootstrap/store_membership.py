"""The membership of a job on several hosts, in a store that the launcher of node 0 serves until the job ends.

A key goes with the connection of the process that has set it, unless it is proposed for good. Each registered rank has
set REGISTERED. A joiner sets a key with the id of its request, under which rank 0 then sets the plan.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from ringcomm.bootstrap.membership import RECONNECT_TIMEOUT, Member
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.sockets import Message
from ringcomm.bootstrap.tcpstore import LastingStore
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["StoreMembership"]

POLL_INTERVAL = 0.1  # seconds between two looks of rank 0 at who has come or is removed, and at the members
JOINER_POLL_INTERVAL = 0.5  # and of a joiner, of which there may be many, at whether any rank is registered
REGISTERED = "registered"


class StoreMembership:
    """See Membership. `patience`: see LastingStore."""

    def __init__(self, place: Place, patience: float | None = None) -> None:
        self._place, self._patience = place, patience
        self._kept: LastingStore | None = None

    def register(self) -> LastingStore:
        registration = LastingStore(self._place)
        registration.set(REGISTERED, b"")
        return registration

    def any_registered(self) -> bool:
        try:
            with self._store() as store:
                return store.find(REGISTERED) is not None
        except CollectiveTimeout:  # the launcher of node 0 is slow, and nothing is known
            return True
        except PeerLost:  # it is lost, and with it the job
            return False

    def remove(self, rank: int) -> None:
        # If the launcher of node 0 is slow, `grow` waits for this rank until its timeout; this launcher must not fail.
        with suppress(CollectiveTimeout, PeerLost), self._store() as store:
            store.propose(_removal_key(rank), b"")

    @contextmanager
    def joiners(self) -> "Iterator[StoreJoiners]":
        with LastingStore(self._place) as store:
            yield StoreJoiners(store)

    def request_plan(self, timeout: float) -> Message | None:
        deadline, request = time.monotonic() + timeout, secrets.token_hex(8)
        with suppress(CollectiveTimeout, PeerLost), LastingStore(self._place) as store:
            store.set(_joiner_key(self._place.rank), request.encode())
            while (left := deadline - time.monotonic()) > 0 and self.any_registered():
                if plan := store.find(_plan_key(request), min(left, JOINER_POLL_INTERVAL)):
                    found: Message = json.loads(plan)
                    return found
        return None

    def confirm(self, job: str, connected: bool) -> bool:
        key = f"{job} is connected"
        with LastingStore(self._place) as store:
            store.propose(key, json.dumps(connected).encode())
            return store.find(key, RECONNECT_TIMEOUT) == b"true"

    def close(self) -> None:
        if self._kept:
            self._kept.close()
            self._kept = None

    @contextmanager
    def _store(self) -> Iterator[LastingStore]:
        self._kept = self._kept or LastingStore(self._place, self._patience)
        try:
            yield self._kept
        except (CollectiveTimeout, PeerLost):  # it has ended, or answers later, as if to the next question
            self.close()
            raise


class StoreJoiners:
    """See Joiners."""

    def __init__(self, store: LastingStore) -> None:
        self._store = store
        self._requests: dict[int, str] = {}

    def wait(self, ranks: Iterable[int], timeout: float, check: Callable[[], object]) -> list[Member]:
        wanted, deadline = [*ranks], time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            # Anew each time: one that has come may have died, and come again with another request.
            found = {rank: self._store.find(_joiner_key(rank)) for rank in wanted}
            self._requests = {rank: request.decode() for rank, request in found.items() if request}
            absent = [rank for rank in wanted if rank not in self._requests and not self._removed(rank)]
            if not (absent and left):
                return [(rank, "") for rank in self._requests]  # no start between hosts watches processes
            self._store.find(_joiner_key(absent[0]), min(left, POLL_INTERVAL))
            check()

    def send(self, plan: Message) -> None:
        for request in self._requests.values():
            self._store.set(_plan_key(request), json.dumps(plan).encode())

    def _removed(self, rank: int) -> bool:
        return self._store.find(_removal_key(rank)) is not None


def _removal_key(rank: int) -> str:
    return f"rank {rank} is removed"


def _joiner_key(rank: int) -> str:
    return f"rank {rank} joins"


def _plan_key(request: str) -> str:
    return f"plan of {request}"
