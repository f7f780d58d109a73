"""What the ranks of one host share of a store: a part of it that is theirs, and one answer for all of them."""

import json
from collections.abc import Sequence
from typing import Any

from ringcomm.bootstrap.client import Meanwhile
from ringcomm.bootstrap.session import ALL, FIRST, Contribution
from ringcomm.bootstrap.start_errors import lost_in_start, missing_ranks, rank_in_job
from ringcomm.bootstrap.store import Store
from ringcomm.errors import CollectiveTimeout, PeerLost, RingcommError
from ringcomm.native import ffi
from ringcomm.transports.calls import CollectiveCall
from ringcomm.transports.shm import ShmTransport
from ringcomm.types import DTYPES

__all__ = ["HostStore", "SharingStore"]

LENGTH_BYTES = 8  # of what is shared


class HostStore:
    """The part of a store that the ranks of one host, `here`, use among themselves."""

    def __init__(self, store: Store, here: Sequence[int]) -> None:
        self._store, self._first = store, here[0]
        self.members: Sequence[int] = [rank_in_job(store.members, rank) for rank in here]
        self.server, self.place = store.server, store.place

    def all_gather(self, given: Contribution, timeout: float, meanwhile: Meanwhile = None) -> bytes | list[int]:
        return self._store.all_gather(given._replace(name=f"host {self._first}/{given.name}"), timeout, meanwhile)

    def abort(self, error: RingcommError) -> None:
        self._store.abort(error)

    def check(self, ask: bool = False) -> None:
        self._store.check(ask)


class SharingStore:
    """A store from which the first rank of each host gets the facts of all, and shares them with its host, `local`."""

    def __init__(self, store: Store, size: int, local: ShmTransport, here: Sequence[int]) -> None:
        self._store, self._size, self._local, self._here = store, size, local, here
        self.server, self.members, self.place = store.server, store.members, store.place
        self.abort, self.check = store.abort, store.check

    def all_gather(self, given: Contribution, timeout: float, meanwhile: Meanwhile = None) -> bytes | list[int]:
        shares = given.reads == ALL
        wanted = FIRST if shares and self._local.rank else given.reads
        gathered = self._store.all_gather(given._replace(reads=wanted), timeout, meanwhile)
        return gathered if isinstance(gathered, list) or not shares else self._share(gathered, timeout)

    def share(self, facts: Any, timeout: float) -> Any:
        """Return the facts of the first rank of this host, as JSON carries them."""
        return json.loads(self._share(json.dumps(facts).encode(), timeout))

    def _share(self, data: bytes, timeout: float) -> bytes:
        local = self._local
        if local.size == 1:
            return data
        try:
            length = self._broadcast(bytearray(len(data).to_bytes(LENGTH_BYTES)), timeout)
            shared = self._broadcast(bytearray(data) if local.rank == 0 else bytearray(int.from_bytes(length)), timeout)
        except (PeerLost, CollectiveTimeout) as error:  # by its rank on this host
            self.check(ask=True)
            if error.rank is None:
                raise
            rank = self._here[error.rank]
            if isinstance(error, PeerLost):
                raise lost_in_start(rank_in_job(self.members, rank)) from None
            raise missing_ranks([rank], self._size, timeout, members=self.members) from None
        return bytes(shared)

    def _broadcast(self, data: bytearray, timeout: float) -> bytearray:
        """Give all ranks of this host what its first one has; the others give room for it."""
        pointer = ffi.from_buffer(data)
        self._local.fused["broadcast"](CollectiveCall(pointer, pointer, len(data), DTYPES["uint8"]), timeout)
        return data
