"""The facts that all ranks of a start exchange through their store."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from harness.failures import until
from harness.nodes import SECRET, store_server
from ringcomm import CollectiveTimeout, Config
from ringcomm.bootstrap import facts
from ringcomm.bootstrap.client import Client, find_endpoint
from ringcomm.bootstrap.facts import all_gather_facts
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import HashStore
from ringcomm.transports import network


class CountingStore:
    """A store that notes what one rank asks it for; `check` asks as well, but as often as time passes."""

    server, members, place = "", (), None

    def __init__(self, store):
        self.store, self.got, self.put, self.check = store, [], [], store.check

    def find(self, key, timeout, meanwhile=None):
        value = self.store.find(key, timeout, meanwhile)
        self.got.append(key)
        return value

    def set(self, key, value):
        self.store.set(key, value)
        self.put.append(key)


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


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_late_is_named_once_and_waited_for_until_one_deadline(monkeypatch, rank):
    now, store, said = 0.0, HashStore(), []
    monkeypatch.setattr(facts, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow(CountingStore):
        def find(self, key, timeout, meanwhile=None):
            nonlocal now
            value = self.store.find(key, 0.0, meanwhile)
            now += timeout if value is None else 0.0
            return value

    store.set("facts/0", b"0")
    store.set("facts/1", b"1")
    with pytest.raises(CollectiveTimeout, match=r"rank 2 of 3 did not arrive within 30 s$"):
        all_gather_facts(Slow(store), "facts", rank, 3, rank, 30.0, late=said.append, late_after=10.0)
    assert [*map(str, said)] == ["timed out: rank 2 of 3 did not arrive within 10 s"]
    assert now == 30.0


def test_the_timeout_of_another_rank_is_raised_and_ends_the_wait():
    store, said = HashStore(), []
    store.abort(CollectiveTimeout("the reason"))
    with pytest.raises(CollectiveTimeout, match="the reason"):
        all_gather_facts(store, "facts", 0, 2, None, 20, late=said.append, late_after=0.0)
    assert said == []


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_does_something_meanwhile(waiting):
    store, calls = HashStore(), []
    with ThreadPoolExecutor() as pool:
        exchange = (store, "facts", waiting, 2, None, 20, lambda: calls.append(waiting))
        started = pool.submit(all_gather_facts, *exchange)
        until(lambda: len(calls) > 2, "two calls")
        all_gather_facts(store, "facts", 1 - waiting, 2, None, 20)
        assert started.result() == [None, None]


@pytest.mark.parametrize("size", [2, 9])
def test_the_requests_to_the_store_grow_with_the_ranks_not_with_their_square(ranks, size):
    def exchange(store, rank, size):
        counting = CountingStore(store)
        all_gather_facts(counting, "facts", rank, size, rank, 20)
        return len(counting.put), len(counting.got)

    first, *others = ranks(size, exchange)
    assert first == (2, size)
    assert others == [(1, 1)] * (size - 1)


def test_a_start_between_hosts_asks_the_store_once_for_what_all_ranks_tell():
    def count(size):
        stores = [CountingStore(store) for store in [HashStore()] * size]

        def start(rank):
            config = Config(timeout=20, host_id=str(rank))
            return network.connect(rank, size, stores[rank], config)

        with ThreadPoolExecutor(size) as pool:
            for transport in [*pool.map(start, range(size))]:
                transport.close()
        return [len(store.put) + len({*store.got}) for store in stores]

    (first, second, third), (first_of_8, *others_of_8) = count(3), count(8)
    assert second == third
    assert others_of_8 == [second] * 7
    assert first_of_8 - first == 3 * 5, "rank 0 collects three kinds of facts"
