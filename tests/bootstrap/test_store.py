"""The stores that ranks share during startup."""

import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from harness.failures import PROMPT, until
from harness.nodes import SECRET, StartClient, store_server
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MemoryShortage, PeerLost, RingcommError
from ringcomm.bootstrap import server
from ringcomm.bootstrap import store as store_module
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import ALL, Contribution, Start
from ringcomm.bootstrap.store import (
    HashStore,
    all_gather_facts,
    await_connected,
    job_store,
    open_store,
    rank_0_server,
    shared_failure,
)
from ringcomm.bootstrap.wire import peers
from ringcomm.bootstrap.wire.framing import HELLO_BYTES, LENGTH, MessageSocket, decode, encode
from ringcomm.bootstrap.wire.unix import UnixGate, user_address
from ringcomm.machine import descriptors

SHORTAGE = MemoryShortage("no memory", rank=1, expected=2, got=1)


def check_shortage(call, *args):
    """The error keeps its facts, and each rank raises its own object: a traceback belongs to one rank."""
    with pytest.raises(MemoryShortage, match=r"^no memory$") as raised:
        call(*args)
    error = raised.value
    assert (error.rank, error.expected, error.got) == (1, 2, 1)
    assert error is not SHORTAGE


def test_any_exception_of_a_rank_aborts_startup_with_its_number():
    store = HashStore()
    with pytest.raises(KeyError, match="the reason"), shared_failure(store, 3):
        raise KeyError("the reason")
    with pytest.raises(Aborted, match=r"^rank 3 aborted startup: KeyError\('the reason'\)$") as raised:
        store.check()
    assert raised.value.rank == 3


@pytest.fixture
def job():
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    until(lambda: threading.active_count() == before, "the end of all threads")


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


def connect(name):
    peer = MessageSocket(socket.socket(socket.AF_UNIX))
    peer.settimeout(10)
    peer.connect(name)
    return peer


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


def test_the_second_process_with_a_rank_is_refused(job, caplog):
    with join(job, 0, 3) as store, join(job, 1, 3):
        with pytest.raises(ArgumentError, match=f"rank 1 is already taken by process {os.getpid()}"):
            join(job, 1, 3)
        with pytest.raises(ArgumentError, match=f"rank 0 .* is already taken by process {os.getpid()}"):
            join(job, 0, 3)
        with join(job, 2, 3) as last:
            check_works(last, store)
    assert "rank 1 is already taken" in caplog.text


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place(1, 2, "", "guessed"), "wrong secret"),
        (Place(1, 2, "", ""), "wrong secret"),
        (Place(1, 3, "", "secret"), "expected a rank of 2, got rank 1 of 3"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_startup_continues(job, caplog, place, reason):
    with join(job, 0, 2, "secret") as store:
        with pytest.raises(ArgumentError, match=reason):
            join(job, place.rank, place.size, place.secret)
        with join(job, 1, 2, "secret") as other:
            check_works(store, other)
    assert reason in caplog.text


def hello(job, rank, size, secret=""):
    return encode("join", session=job, rank=rank, size=size, members=[], process="a test", secret=secret)


def garbage(job):
    return (
        b"x",
        b"\xff\0" * 1000,
        b"[" * 60_000,
        b"[]",
        b'{"kind": "join"}',
        encode("join", session=job, rank=float("inf"), size=2, members=[], process="", secret=""),
        encode("join", session=job, rank=1, size=2, members=[0], process="", secret=""),
        hello(job, 1, 2, "\ud800"),
        hello(job, -1, 2),
        hello(job, 2, 2),
    )


def refused(peer):
    """Return whether the server has refused this peer, and disconnected."""
    return decode(peer.recv(1000)).kind == "refused" and peer.recv(1000) == b""


@pytest.mark.parametrize("secret", ["", "secret"])
def test_untrusted_peers_do_not_block_startup(job, caplog, monkeypatch, secret):
    monkeypatch.setattr(peers, "INTERVAL", 0.0)  # log each
    with join(job, 0, 2, secret) as store, connect(user_address(job)):
        for each in garbage(job):
            with connect(user_address(job)) as peer:
                peer.send(each)
                assert refused(peer)
        with join(job, 1, 2, secret) as other:
            check_works(other, store)
    assert caplog.text.count(f"refused process {os.getpid()}: ") == len(garbage(job))


@pytest.mark.parametrize(
    "request_of_rank",
    [
        b"garbage",
        encode("all_gather", id=0, key="key", rank=0),
        encode("all_gather", id=0, key="key", rank="no number", size=2, reads=ALL),
        encode("all_gather", id=0, key="key", rank=2, size=2, reads=ALL),
        encode("missing", id=0, key="key", size=1 << 60, reads=ALL),
        b'{"kind": "all_gather"',
        encode("get", id=0, key="key"),
        encode("get", key="key", wait=True),
        encode("abort", b"no error"),
        encode("sing"),
    ],
)
def test_garbage_from_a_rank_of_a_job_without_secret_does_not_stop_rank_0(job, caplog, request_of_rank):
    with join(job, 0, 3) as store, connect(user_address(job)) as peer, join(job, 1, 3) as other:
        peer.send(hello(job, 2, 3))
        assert decode(peer.recv(100)).kind == "joined"
        peer.send(request_of_rank)
        assert refused(peer)
        check_works(other, store)
    assert "malformed request" in caplog.text


def test_a_flood_of_refused_peers_is_a_few_lines(job, caplog):
    began = time.monotonic()
    with join(job, 0, 2, "secret"):
        for _ in range(100):
            with connect(user_address(job)) as peer:
                peer.send(hello(job, 1, 2, "guessed"))
                assert refused(peer)
    # The first, one each second, and the rest at the end.
    assert len(caplog.messages) <= 2 + time.monotonic() - began
    assert all("wrong secret for this job" in line for line in caplog.messages)


@pytest.fixture
def another_user():
    """Return a function that starts code of another user, with a socket `s` and the name of the store in `name`."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    begin = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "

    def start(job, code):
        command = [sys.executable, "-I", "-S", "-c", f"{begin}name = {user_address(job)!r}; {code}"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.slow
def test_another_user_is_refused_and_startup_continues(job, caplog, another_user):
    said = hello(job, 1, 2)
    said = LENGTH.pack(len(said)) + said
    with join(job, 0, 2) as store:
        with another_user(job, f"s.connect(name); s.send({said!r}); print(s.recv(100))") as process:
            assert "joined" not in process.communicate(timeout=20)[0]
        with join(job, 1, 2) as other:
            check_works(other, store)
    assert "belongs to user 65534, not to user 0" in caplog.text


@pytest.mark.slow
def test_an_address_that_another_user_holds_is_not_trusted(job, another_user):
    with another_user(job, "s.bind(name); s.listen(); print('here', flush=True); sys.stdin.read()") as thief:
        thief.stdout.readline()
        with pytest.raises(RingcommError, match=r"process \d+ belongs to user 65534, not to user 0"):
            join(job, 1, 2)
        with pytest.raises(ArgumentError, match=f"already taken by process {thief.pid} of user 65534"):
            join(job, 0, 2)
        thief.stdin.close()


def test_a_rank_0_that_leaves_early_is_peer_lost(job):
    with joined(job, 3) as (rank_0, store), ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.find, "key", 20)
        rank_0.close()
        for call in (waiting.result, lambda: store.set("key", b"")):
            with pytest.raises(PeerLost, match="rank 0 has ended during startup") as raised:
                call()
            assert raised.value.rank == 0
        store.abort(PeerLost("no rank reads this"))


def test_rank_0_leaves_only_after_the_others_have_its_error(job):
    with joined(job, 3) as (rank_0, store), ThreadPoolExecutor() as pool:
        rank_0.abort(SHORTAGE)
        leaving = pool.submit(rank_0.close)
        check_shortage(store.find, "key", 20)
        assert not leaving.done()
        store.close()


def test_startup_that_fails_on_one_rank_fails_on_all(job, monkeypatch):
    monkeypatch.setattr("ringcomm.bootstrap.store._starts", itertools.count())
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, f"{job}#0", 1, 2)
        with pytest.raises(MemoryShortage), open_store(Place(0, 2, job), 20):  # noqa: PT012
            store = rank_1.result().thing
            leaving = pool.submit(lambda: (check_shortage(store.find, "key", 20), store.close()))
            raise SHORTAGE
        leaving.result()


def test_rank_0_serves_until_the_others_have_left(job):
    with joined(job) as (rank_0, store), ThreadPoolExecutor() as pool:
        rank_0.set("key", b"value")
        leaving = pool.submit(rank_0.close)
        assert store.find("key", 10) == b"value"
        assert not leaving.done()
        store.close()


def test_rank_0_does_not_wait_forever_for_a_rank_that_stays(job, monkeypatch):
    monkeypatch.setattr(server, "LINGER", 0.01)
    rank_0 = join(job, 0, 2)
    with join(job, 1, 2):
        rank_0.thing.close()


def test_rank_0_waits_as_long_as_it_is_told_unless_the_start_fails(job, monkeypatch):
    monkeypatch.setattr(server, "LINGER", 0.01)
    gate = UnixGate(user_address(job), "this test")
    serving = server.Server(gate, 0, "", (job, Start(1)), linger=3600.0)
    with (
        closing(Client(find_endpoint(place := Place(0, 1, job)), job, place, 20)) as stays,
        ThreadPoolExecutor() as pool,
    ):
        leaving = pool.submit(serving.close)
        with pytest.raises(TimeoutError):
            leaving.result(0.5)
        stays.abort(SHORTAGE)
        leaving.result(20)


def test_all_attributes_of_an_error_arrive_and_a_long_text_is_cut_with_a_sentence(stores):
    ranks = [*range(20_000)]
    stores[0].abort(CollectiveTimeout("timed out: " + 100_000 * "x", got=ranks))
    with pytest.raises(CollectiveTimeout) as caught:
        stores[1].all_gather(Contribution("values", 1, 2, b""), 20)
    assert caught.value.got == ranks
    assert str(caught.value).startswith("timed out: xxx")
    assert str(caught.value).endswith("xxx … (this text was cut)")
    assert len(str(caught.value)) == 1 << 16


def test_a_peer_that_has_not_joined_cannot_send_much(job):
    with join(job, 0, 2), connect(user_address(job)) as peer:
        socket.socket.send(peer, LENGTH.pack(HELLO_BYTES + 1))
        assert peer.recv(1000) == b""  # disconnected


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


def test_rank_0_provides_descriptors_before_it_accepts_and_tells_the_others_if_it_cannot(job, monkeypatch):
    def refuse(*_):
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(user_address(job))
        raise RingcommError("too many ranks", rank=0)

    def join(rank):
        with pytest.raises(RingcommError, match="too many ranks"), job_store(Place(rank, 2, job), 20) as store:
            store.find("never set", 20)

    monkeypatch.setattr(descriptors, "provide", refuse)
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        list(pool.map(join, range(2)))
    assert time.monotonic() - started < PROMPT


RANK_0 = """
import sys
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.store import job_store
from ringcomm.errors import PeerLost

try:
    with job_store(Place(0, 3, sys.argv[1]), 20) as store:
        store.find("never set", 20)
except PeerLost as error:
    print(error.rank, flush=True)
"""


def test_a_rank_that_arrives_late_is_told_who_has_died_though_rank_0_is_exiting(job):
    with subprocess.Popen([sys.executable, "-c", RANK_0, job], stdout=subprocess.PIPE, text=True) as rank_0:
        Rank(Place(1, 3, job)).die()
        assert rank_0.stdout.readline() == "1\n"
        with pytest.raises(PeerLost, match=r"^rank 1 .* exited during startup$") as raised:
            Rank(Place(2, 3, job))
    assert raised.value.rank == 1
    assert rank_0.returncode == 0


def test_rank_0_does_not_wait_forever_for_a_rank_that_never_arrives(job, monkeypatch):
    monkeypatch.setattr(store_module, "LATE", 0.01)
    with pytest.raises(MemoryShortage), job_store(Place(0, 2, job), 20):
        raise SHORTAGE


def test_an_interrupted_start_ends_at_once(job):
    with pytest.raises(KeyboardInterrupt), job_store(Place(0, 2, job), 20):
        raise KeyboardInterrupt
    with pytest.raises(ConnectionRefusedError), closing(socket.socket(socket.AF_UNIX)) as peer:
        peer.connect(user_address(job))
