"""The facts that all ranks of a start exchange through their store."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from harness.failures import until
from harness.nodes import SECRET, store_server
from ringcomm import CollectiveTimeout, Config
from ringcomm.bootstrap.client import Client, find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import HashStore, all_gather_facts
from ringcomm.transports import network


class CountingStore:
    """A store that counts what one rank asks it for; `check` asks as well, but as often as time passes."""

    server, members, place = "", (), None

    def __init__(self, store):
        self.store, self.count, self.check = store, 0, store.check

    def all_gather(self, *args):
        self.count += 1
        return self.store.all_gather(*args)


@pytest.fixture(params=["threads", "hosts"])
def ranks(request):
    """Return a function that calls `fn(store, rank, size)` on threads, and returns the results."""

    def run(size, fn):
        with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
            if request.param == "threads":
                stores = [HashStore()] * size
            else:
                address = stack.enter_context(store_server())
                places = [Place(rank, size, "facts", SECRET, store=address) for rank in range(size)]
                stores = [stack.enter_context(Client(find_endpoint(place), place.job, place, 20)) for place in places]
            return [*pool.map(lambda rank: fn(stores[rank], rank, size), range(size))]

    return run


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_the_facts_of_all_also_if_they_are_long(ranks, size):
    def exchange(store, rank, size):
        short = all_gather_facts(store, "short", rank, size, {"rank": rank, "name": "é"}, 20)
        return short, all_gather_facts(store, "long", rank, size, 30_000 * str(rank), 20)

    expected = [{"rank": rank, "name": "é"} for rank in range(size)], [30_000 * str(rank) for rank in range(size)]
    assert ranks(size, exchange) == [expected] * size


def test_the_ranks_that_are_late_are_named_by_all_after_one_timeout(ranks):
    text = r"^timed out: ranks 1-5 of 7 did not arrive within 1 s$"

    def exchange(store, rank, size):
        before = time.monotonic()
        if rank not in range(1, 6):
            with pytest.raises(CollectiveTimeout, match=text) as raised:
                all_gather_facts(store, "facts", rank, size, rank, 1)
            assert raised.value.rank == 1
        return time.monotonic() - before

    assert max(ranks(7, exchange)) < 5 * 1


def test_a_rank_0_that_is_late_is_named(ranks):
    def exchange(store, rank, size):
        if rank:
            with pytest.raises(CollectiveTimeout, match=r"^timed out: rank 0 of 3 did not arrive within 0\.5 s$"):
                all_gather_facts(store, "facts", rank, size, rank, 0.5)

    ranks(3, exchange)


def test_the_reason_of_another_rank_comes_first(ranks):
    def exchange(store, rank, size):
        if rank == 2:
            store.abort(CollectiveTimeout("the reason"))
        else:
            with pytest.raises(CollectiveTimeout, match="the reason"):
                all_gather_facts(store, "facts", rank, size, rank, 20)

    ranks(3, exchange)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_does_something_meanwhile(waiting):
    store, calls = HashStore(), []
    with ThreadPoolExecutor() as pool:
        exchange = (store, "facts", waiting, 2, None, 20, lambda: calls.append(waiting))
        started = pool.submit(all_gather_facts, *exchange)
        until(lambda: len(calls) > 2, "two calls")
        all_gather_facts(store, "facts", 1 - waiting, 2, None, 20)
        assert started.result() == [None, None]


def test_a_start_between_hosts_asks_the_store_once_for_what_all_ranks_tell():
    def count(size):
        stores = [CountingStore(store) for store in [HashStore()] * size]

        def start(rank):
            config = Config(timeout=20, host_id=str(rank))
            return network.connect(rank, size, stores[rank], config)

        with ThreadPoolExecutor(size) as pool:
            for transport in [*pool.map(start, range(size))]:
                transport.close()
        return [store.count for store in stores]

    assert {*count(3)} == {*count(8)} == {3}  # for the facts, UCX and the addresses of the mesh
