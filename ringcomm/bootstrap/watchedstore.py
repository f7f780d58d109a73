"""The store of a startup whose ranks know each other's processes: the death of one ends it at once."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.process_watch import ProcessWatch
from ringcomm.bootstrap.socketstore import SocketStore
from ringcomm.bootstrap.store import Store, shared_failure
from ringcomm.machine import descriptors

__all__ = ["watched_store"]


@contextmanager
def watched_store(place: Place, processes: Sequence[str], timeout: float) -> Iterator[Store]:
    """Open the store of a job that no other startup uses; `processes`: of each rank its `process_id`.

    Raises PeerLost on all ranks if one dies before it has joined. Later ones their connections show.
    """
    with closing(ProcessWatch(place.members[place.rank])) as watch:
        if place.rank == 0:
            descriptors.provide(0, place.size, place.members)
        # Rank 0 tells the others, as long as it lives.
        for rank in range(1, place.size) if place.rank == 0 else (0,):
            watch.add(place.members[rank], processes[rank], now=True)
        with _WatchedStore(place, timeout, watch) as store, shared_failure(store, place.rank):
            yield store


class _WatchedStore(SocketStore):
    _late = 1.0  # seconds for which the server tells those that arrive after a failure: one that has died never does

    def __init__(self, place: Place, timeout: float, watch: ProcessWatch) -> None:
        self._watch = watch
        super().__init__(place, timeout)

    def __exit__(self, _: object, error: object, __: object) -> None:
        self.close(late=self._late if isinstance(error, Exception) else 0.0)

    def check(self) -> None:
        super().check()
        self._watch.check()

    def _join(self, connect: Callable[[float], socket.socket], identity: bytes, timeout: float) -> socket.socket:
        def connect_to_the_living(seconds: float) -> socket.socket:
            self._watch.check()
            return connect(seconds)

        return super()._join(connect_to_the_living, identity, timeout)
