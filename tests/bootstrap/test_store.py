"""The stores that ranks share during startup."""

import itertools
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cases.start_stores import SHORTAGE, Rank, check_shortage, join, joined
from harness.failures import PROMPT
from harness.nodes import SECRET, store_server
from ringcomm import Aborted, CollectiveTimeout, PeerLost
from ringcomm.bootstrap import server
from ringcomm.bootstrap import store as store_module
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import Contribution, Start
from ringcomm.bootstrap.store import HashStore, all_gather_facts, await_connected, job_store, open_store, shared_failure

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_any_exception_of_a_rank_aborts_startup_with_its_number():
    store = HashStore()
    with pytest.raises(KeyError, match="the reason"), shared_failure(store, 3):
        raise KeyError("the reason")
    with pytest.raises(Aborted, match=r"^rank 3 aborted startup: KeyError\('the reason'\)$") as raised:
        store.check()
    assert raised.value.rank == 3


@pytest.fixture(params=["threads", "processes", "hosts"])
def stores(request, job):
    """The stores of two ranks."""
    if request.param == "threads":
        yield (HashStore(),) * 2
    elif request.param == "hosts":
        with store_server() as address, ExitStack() as stack:
            places = [Place(rank, 2, job, SECRET, store=address) for rank in range(2)]
            yield [stack.enter_context(closing(Rank(place))) for place in places]
    else:
        with joined(job) as found:
            yield found


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_get_what_each_gives(job, size):
    def rank(number):
        with join(job, number, size) as store:
            return store.all_gather(Contribution("values", number, size, bytes([number]) + b"\0tail"), 20)

    with ThreadPoolExecutor(size) as pool:
        # Backwards, so that the others join before rank 0 listens.
        found = list(pool.map(rank, reversed(range(size))))
    assert found == [b"[" + b",".join(bytes([number]) + b"\0tail" for number in range(size)) + b"]"] * size


@pytest.mark.parametrize("length", [1, 5_000_000])
def test_the_last_rank_wakes_those_that_wait(stores, length):
    value = os.urandom(length)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(stores[0].all_gather, Contribution("values", 0, 2, b"0"), 20)
        gathered = stores[1].all_gather(Contribution("values", 1, 2, value), 20)
        assert gathered == waiting.result() == b"[0," + value + b"]"


def test_the_ranks_whose_values_have_not_come_are_told(stores):
    assert stores[1].all_gather(Contribution("values", 1, 2, b"1"), 0.05) == [0]


class Failing:
    """The store of a rank that fails before it hears that all have connected; all have, if it has `come`."""

    members = ()

    def __init__(self, store, come):
        self.store, self.come, self.abort = store, come, store.abort

    def all_gather(self, *args):
        gathered, self.all_gather = self.store.all_gather(*args) if self.come else None, self.store.all_gather
        assert gathered is None or isinstance(gathered, bytes)
        raise SHORTAGE


@pytest.mark.parametrize("come", [True, False])
def test_what_comes_first_to_the_store_decides_for_all_whether_they_have_connected(stores, come):
    with ThreadPoolExecutor() as pool:
        other = pool.submit(await_connected, stores[0], 0, 2, 20)
        if come:
            await_connected(Failing(stores[1], come), 1, 2, 20)
            other.result()
        else:
            check_shortage(await_connected, Failing(stores[1], come), 1, 2, 20)
            check_shortage(other.result)


@pytest.mark.parametrize("hosts", [False, True])
def test_a_rank_that_is_late_in_a_start_of_some_ranks_is_named_by_its_rank_in_the_job(job, hosts, monkeypatch):
    """Ranks 1, 4 and 5 start together, as in `grow`; the last one does not come."""
    monkeypatch.setattr(store_module, "LATE", 0.1)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        address = stack.enter_context(store_server()) if hosts else ""

        def wait_for_all(rank):
            place = Place(rank, 3, job, SECRET, store=address, members=(1, 4, 5))
            with pytest.raises(CollectiveTimeout) as caught, job_store(place, 20) as store:
                all_gather_facts(store, "facts", rank, 3, None, 0.1)
            return str(caught.value), caught.value.rank, caught.value.got

        errors = [*pool.map(wait_for_all, range(2))]
    assert errors == [("timed out: rank 5 did not arrive within 0.1 s", 5, [5])] * 2


@pytest.mark.parametrize("hosts", [False, True])
def test_the_death_of_one_of_some_ranks_is_named_by_its_rank_in_the_job(job, hosts):
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        address = stack.enter_context(store_server()) if hosts else ""
        places = [Place(rank, 2, job, SECRET, store=address, members=(1, 4)) for rank in range(2)]
        opened = [pool.submit(Rank, place) for place in places]
        store, other = [stack.enter_context(closing(each.result())) for each in opened]
        other.client._socket.shutdown(socket.SHUT_RDWR)  # as if it had died
        with pytest.raises(PeerLost, match=r"rank 4 \(process .*\) exited during startup") as caught:
            store.find("key", 20)
        assert caught.value.rank == 4


def test_the_hello_of_a_rank_stays_short_in_a_start_of_many(monkeypatch):
    monkeypatch.setattr(server, "HELLO_BYTES", 1000)
    with server.serve_one_host(Place(3, 10_000, "job")) as place, open_store(place, 5) as store:
        assert store.members == range(10_000)
        store.check()


def test_abort_reaches_waiting_ranks_and_the_first_error_wins(stores):
    store, other = stores
    store.check()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.all_gather, Contribution("values", 0, 2, b"0"), 20)
        other.abort(SHORTAGE)
        other.abort(PeerLost("a consequence"))
        check_shortage(waiting.result)
    check_shortage(other.all_gather, Contribution("values", 1, 2, b"1"), 20)
    check_shortage(other.all_gather, Contribution("alone", 0, 1, b"1"), 20)
    check_shortage(store.check)


def test_a_rank_that_asks_nothing_hears_of_a_failure(job, monkeypatch):
    with joined(job) as (store, other), monkeypatch.context() as patch:
        patch.setattr(store.client, "tell", None)
        store.check()
        other.abort(SHORTAGE)
        assert select.select([store.client], [], [], PROMPT)[0]
        check_shortage(store.check)


def test_abort_reaches_ranks_that_join_later(job):
    with joined(job, 4) as (store, _):
        store.abort(SHORTAGE)
        check_shortage(join, job, 2, 4)


@pytest.mark.parametrize("serving", ["processes", "hosts"])
def test_a_late_answer_is_not_taken_for_that_of_the_next_get(job, serving, monkeypatch):
    resumed, poll = threading.Event(), Start.poll
    with ExitStack() as stack:
        if serving == "hosts":
            place = Place(1, 2, job, SECRET, store=stack.enter_context(store_server()))
            store = stack.enter_context(closing(Rank(place)))
        else:
            _, store = stack.enter_context(joined(job))
        stack.callback(resumed.set)
        store.set("key", b"value")
        monkeypatch.setattr(Start, "poll", lambda self: resumed.wait() and poll(self))
        monkeypatch.setattr(store.client, "_patience", 0.1)
        store.client.tell("get", id=-1, key="key", wait=False)  # the server waits from now on
        with pytest.raises(CollectiveTimeout, match=r"did not answer within 0\.1 s"):
            store.find("another", 0.05)
        resumed.set()
        monkeypatch.setattr(store.client, "_patience", 20)
        assert store.find("key", 0.05) == b"value"
        store.check()


def test_rank_0_gets_a_failure_at_once_though_another_rank_is_stopped(job):
    with ThreadPoolExecutor() as pool:
        stores = [pool.submit(Rank, Place(rank, 2, job)) for rank in range(2)]
        first, stopped = (store.result() for store in stores)

    def fail():
        try:
            first.abort(CollectiveTimeout("the reason"))
            first.check(ask=True)
        finally:
            first.close(late=10)

    with closing(stopped):
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="the reason"):
            fail()
        assert time.monotonic() - start < server.LINGER / 2
        with pytest.raises(CollectiveTimeout, match="the reason"):  # it continues
            stopped.check()


def test_a_job_of_one_rank_opens_no_socket(job):
    with open_store(Place(0, 1, job), 1) as store:
        assert store.all_gather(Contribution("values", 0, 1, b"0"), 1) == b"[0]"
    assert job not in Path("/proc/net/unix").read_text()


def test_a_missing_rank_0_is_named(job):
    text = r"^timed out: rank 0 did not answer within 0\.05 s \(Connection refused\) during startup$"
    with pytest.raises(CollectiveTimeout, match=text):
        join(job, 1, 2, timeout=0.05)


def test_all_attributes_of_an_error_arrive_and_a_long_text_is_cut_with_a_sentence(stores):
    ranks = [*range(20_000)]
    stores[0].abort(CollectiveTimeout("timed out: " + 100_000 * "x", got=ranks))
    with pytest.raises(CollectiveTimeout) as caught:
        stores[1].all_gather(Contribution("values", 1, 2, b""), 20)
    assert caught.value.got == ranks
    assert str(caught.value).startswith("timed out: xxx")
    assert str(caught.value).endswith("xxx … (this text was cut)")
    assert len(str(caught.value)) == 1 << 16


def test_a_member_that_does_not_read_delays_nobody(stores):
    """The server keeps what the kernel has no room for."""
    reading, idle = stores
    if isinstance(idle, HashStore):
        return
    for number in range(10):
        reading.set(f"key {number}", bytes(1_000_000 + number))
        idle.client.tell("get", id=-1, key=f"key {number}", wait=False)
    assert len(reading.find("key 9", 20)) == 1_000_009  # the last one has arrived
    assert len(idle.find("key 9", 20)) == 1_000_009


def test_the_second_startup_of_a_job_has_its_own_store(job, monkeypatch):
    monkeypatch.setattr("ringcomm.bootstrap.store._starts", itertools.count())
    for number in range(2):
        with open_store(Place(0, 2, job), 20) as store, join(f"{job}#{number}", 1, 2) as other:
            store.all_gather(Contribution("key", 0, 1, b"%d" % number), 20)
            assert other.find("key", 20) == b"%d" % number
