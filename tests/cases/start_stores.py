"""The store of a start on one host, which rank 0 serves."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from harness.nodes import StartClient
from ringcomm import MemoryShortage
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import rank_0_server

SHORTAGE = MemoryShortage("no memory", rank=1, expected=2, got=1)


def check_shortage(call, *args):
    """The error keeps its facts, and each rank raises its own object: a traceback belongs to one rank."""
    with pytest.raises(MemoryShortage, match=r"^no memory$") as raised:
        call(*args)
    error = raised.value
    assert (error.rank, error.expected, error.got) == (1, 2, 1)
    assert error is not SHORTAGE


class Rank:
    """A rank in the store of a start, which rank 0 of one host serves."""

    def __init__(self, place, timeout=20):
        self.server = None if place.rank or place.store else rank_0_server(place)
        self.client = StartClient(find_endpoint(place), place.job, place, timeout)
        self.find, self.set, self.all_gather = self.client.find, self.client.set, self.client.all_gather
        self.abort, self.check = self.client.abort, self.client.check

    def close(self, late=0.0):
        self.client.close()
        if self.server:
            self.server.close(late)
            self.server = None

    def die(self):
        self.client._socket.close()


def join(job, rank, size, secret="", timeout=20):
    return closing(Rank(Place(rank, size, job, secret), timeout))


def check_works(store, other):
    """Pass a value from one rank to another."""
    store.set("key", b"value")
    assert other.find("key", 20) == b"value"


@contextmanager
def joined(job, size=2):
    """Yield the stores of ranks 0 and 1."""
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, size)
        with join(job, 0, size) as store, rank_1.result() as other:
            yield store, other
