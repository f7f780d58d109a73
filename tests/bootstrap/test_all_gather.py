"""The facts that all ranks of a start exchange through their store."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from harness.failures import until
from harness.nodes import SECRET, store_server
from ringcomm import CollectiveTimeout, Config
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import HashStore, all_gather_facts
from ringcomm.transports import network


class CountingStore:
    """A store that counts the facts that one rank gathers, and those that it gets."""

    server, members, place = "", (), None

    def __init__(self, store):
        self.store, self.count, self.got, self.check, self.abort = store, 0, 0, store.check, store.abort

    def all_gather(self, *args):
        gathered = self.store.all_gather(*args)
        self.count += 1
        self.got += len(json.loads(gathered))
        return gathered


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


@pytest.fixture
def start_between_hosts():
    """Return a function that starts ranks on hosts of so many; it returns the stores that they have asked."""

    def start(size, per_host):
        stores = [CountingStore(store) for store in [HashStore()] * size]

        def connect(rank):
            config = Config(timeout=20, host_id=str(rank // per_host))
            return network.connect(rank, size, stores[rank], config)

        with ThreadPoolExecutor(size) as pool:
            for transport in [*pool.map(connect, range(size))]:
                transport.close()
        return stores

    return start


def test_a_start_between_hosts_asks_the_store_once_for_what_all_ranks_tell(start_between_hosts):
    for size in (3, 8):  # for the hosts, their facts, UCX and the addresses of the mesh
        assert {store.count for store in start_between_hosts(size, per_host=1)} == {4}


def test_one_rank_of_each_host_gets_the_facts_of_all_and_shares_them(start_between_hosts):
    size, per_host = 8, 4
    first, *others = [store.got for store in start_between_hosts(size, per_host)[:per_host]]
    assert first == per_host + 3 * size + per_host + 1  # its host; facts, UCX, addresses; in its host hello and ready
    assert {*others} == {per_host + 3 + 2}
