"""The stores at which ranks meet."""

import hashlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MemoryShortage, PeerLost, storeserver
from ringcomm.place import Place
from ringcomm.store import HashStore, SocketStore, open_store, shared_failure
from ringcomm.storeserver import HELLO


def test_threads_meet_at_a_hash_store():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(store.get, "key", 10) for _ in range(3)]
        store.set("key", b"value")
        assert [each.result() for each in waiting] == [b"value"] * 3
    with pytest.raises(CollectiveTimeout, match=r"no rank has set 'other' within 0\.01 s"):
        store.get("other", 0.01)


SHORTAGE = MemoryShortage("no memory", rank=1, expected=2, got=1)


def check_shortage(call, *args):
    """The error is told with its facts, and is another one on every rank: a traceback belongs to one."""
    with pytest.raises(MemoryShortage, match=r"^no memory$") as raised:
        call(*args)
    error = raised.value
    assert (error.rank, error.expected, error.got) == (1, 2, 1)
    assert error is not SHORTAGE


def test_who_aborts_wakes_all_threads():
    store = HashStore()
    store.check()
    store.set("key", b"value")
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(store.get, "other", 20) for _ in range(3)]
        store.abort(SHORTAGE)
        store.abort(PeerLost("what followed"))
        for each in waiting:
            check_shortage(each.result)
    check_shortage(store.get, "key", 20)
    check_shortage(store.check)


def test_any_failure_of_a_rank_is_shared_under_its_number():
    store = HashStore()
    with pytest.raises(KeyError, match="the reason"), shared_failure(store, 3):
        raise KeyError("the reason")
    with pytest.raises(Aborted, match=r"^rank 3 ended the start: KeyError\('the reason'\)$") as raised:
        store.check()
    assert raised.value.rank == 3


@pytest.fixture
def job():
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def address(job):
    return f"\0ringcomm-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def join(job, rank, size, nonce="", timeout=20):
    return closing(SocketStore(Place(rank, size, job, nonce), timeout))


def connect(name):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(10)
    stranger.connect(name)
    return stranger


@pytest.mark.parametrize("size", [2, 5])
def test_what_one_rank_sets_all_ranks_get(job, size):
    def rank(number):
        with join(job, number, size) as store:
            store.set(f"from {number}", bytes([number]) + b"\0tail")
            return [store.get(f"from {other}", 20) for other in range(size)]

    with ThreadPoolExecutor(size) as pool:
        # Backwards, so that rank 0 is not there when the others come.
        found = list(pool.map(rank, reversed(range(size))))
    assert found == [[bytes([number]) + b"\0tail" for number in range(size)]] * size


def test_those_who_did_not_arrive_are_named(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 4)
        with join(job, 0, 4) as store, rank_1.result() as other:
            with pytest.raises(
                CollectiveTimeout, match=r"^ranks 2 and 3 of 4 did not arrive within 0\.05 s$"
            ) as raised:
                store.get("key", 0.05)
            assert raised.value.rank == 2
            with pytest.raises(CollectiveTimeout, match="ranks 2 and 3 of 4"):
                other.get("key", 0.05)


def test_a_key_that_nobody_sets_is_named(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 2)
        with join(job, 0, 2) as store, rank_1.result(), pytest.raises(CollectiveTimeout, match="no rank has set 'key'"):
            store.get("key", 0.05)


def test_a_missing_rank_0_is_named(job):
    with pytest.raises(CollectiveTimeout, match=r"^rank 0 of 2 did not arrive within 0\.05 s$"):
        join(job, 1, 2, timeout=0.05)


def test_the_second_to_claim_a_rank_is_refused_and_told(job, caplog):
    with join(job, 0, 3) as store, join(job, 1, 3):
        with pytest.raises(ArgumentError, match=f"rank 1 is already taken by process {os.getpid()}"):
            join(job, 1, 3)
        with pytest.raises(ArgumentError, match=f"rank 0 .* is already taken by process {os.getpid()}"):
            join(job, 0, 3)
        with join(job, 2, 3) as last:
            last.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert "rank 1 is already taken" in caplog.text


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place(1, 2, "", "guessed"), "does not know the nonce"),
        (Place(1, 2, "", ""), "does not know the nonce"),
        (Place(1, 3, "", "nonce"), "rank 1 of 3 to a job of 2"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_told_and_the_start_goes_on(job, caplog, place, reason):
    with join(job, 0, 2, "nonce") as store:
        with pytest.raises(ArgumentError, match=reason):
            join(job, place.rank, place.size, place.nonce)
        with join(job, 1, 2, "nonce") as other:
            store.set("key", b"value")
            assert other.get("key", 10) == b"value"
    assert reason in caplog.text


NONSENSE = (
    b"x",
    b"\xff\0" * 1000,
    b"[" * 60_000,
    b'{"rank": Infinity, "size": 2, "nonce": ""}',
    rb'{"rank": 1, "size": 2, "nonce": "\ud800"}',
    HELLO.pack(1, 2) + b"\xed\xa0\x80",
    HELLO.pack(-1, 2),
    HELLO.pack(2, 2),
)


@pytest.mark.parametrize("nonce", ["", "nonce"])
def test_strangers_that_are_silent_or_talk_nonsense_do_not_block_the_start(job, caplog, nonce):
    with join(job, 0, 2, nonce) as store, connect(address(job)):
        for words in NONSENSE:
            with connect(address(job)) as stranger:
                stranger.send(words)
                assert stranger.recv(100).startswith(b"refused\0")
                assert stranger.recv(100) == b""  # hung up
        with join(job, 1, 2, nonce) as other:
            other.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert caplog.text.count(f"refused process {os.getpid()}: it ") == len(NONSENSE)


@pytest.mark.parametrize("words", [b"nonsense", b"set\0key", b"set\0\xff\0", b"get\0nan\0key", b"get\0soon\0key"])
def test_a_stranger_that_comes_as_a_rank_where_there_is_no_nonce_cannot_stop_rank_0(job, caplog, words):
    with join(job, 0, 3) as store, connect(address(job)) as stranger, join(job, 1, 3) as other:
        stranger.send(HELLO.pack(2, 3))
        assert stranger.recv(100) == b"welcome\0"
        stranger.send(words)
        assert stranger.recv(100) == b""
        other.set("key", b"value")
        assert store.get("key", 10) == b"value"
    assert "it does not speak like a rank" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_and_the_start_goes_on(job, caplog):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.connect('\\0' + sys.argv[1]); s.send(bytes.fromhex(sys.argv[2])); print(s.recv(100))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, address(job)[1:], HELLO.pack(1, 2).hex()]
    with join(job, 0, 2) as store:
        refused = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert "welcome" not in refused.stdout
        with join(job, 1, 2) as other:
            other.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert "belongs to user 65534, not to user 0" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_address_that_another_user_holds_is_not_trusted(job, caplog):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind('\\0' + sys.argv[1]); s.listen(); print('here', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-S", "-c", code, address(job)[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as thief:
        thief.stdout.readline()
        with pytest.raises(CollectiveTimeout, match="rank 0 of 2"):
            join(job, 1, 2, timeout=0.1)
        with pytest.raises(ArgumentError, match=f"already taken by process {thief.pid} of user 65534"):
            join(job, 0, 2)
        thief.stdin.close()
    assert caplog.text.count("belongs to user 65534, not to user 0") == 1


def test_a_rank_0_that_leaves_early_is_lost(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 3)
        rank_0 = join(job, 0, 3)
        with rank_1.result() as store:
            waiting = pool.submit(store.get, "key", 20)
            rank_0.thing.close()
            with pytest.raises(PeerLost, match="rank 0 has left the start") as raised:
                waiting.result()
            assert raised.value.rank == 0
            with pytest.raises(PeerLost, match="rank 0 has left the start"):
                store.set("key", b"")
            store.abort(PeerLost("nobody hears this"))


def test_who_aborts_is_heard_by_those_who_wait_and_those_who_come_later(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 4)
        with join(job, 0, 4) as store, rank_1.result() as other:
            store.check()
            waiting = pool.submit(store.get, "key", 20)
            other.abort(SHORTAGE)
            other.abort(PeerLost("what followed"))
            check_shortage(waiting.result)
            check_shortage(store.check)
            with join(job, 2, 4) as late:
                check_shortage(late.get, "key", 20)


def test_rank_0_leaves_only_when_the_others_know_its_failure(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 3)
        rank_0 = join(job, 0, 3).thing
        with rank_1.result() as store:
            rank_0.abort(SHORTAGE)
            leaving = pool.submit(rank_0.close)
            check_shortage(store.get, "key", 20)
            assert not leaving.done()
        leaving.result()


def test_a_start_that_fails_on_one_rank_fails_on_all(job, monkeypatch):
    monkeypatch.setattr("ringcomm.store._starts", itertools.count())
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, f"{job}#0", 1, 2)
        with pytest.raises(MemoryShortage), open_store(Place(0, 2, job), 20):  # noqa: PT012
            store = pool.submit(rank_1.result().__enter__).result()
            leaving = pool.submit(lambda: (check_shortage(store.get, "key", 20), store.close()))
            raise SHORTAGE
        leaving.result()


def test_rank_0_serves_on_until_the_others_have_left(job):
    with ThreadPoolExecutor() as pool:
        rank_0 = join(job, 0, 2).thing
        rank_0.set("key", b"value")
        with join(job, 1, 2) as store:
            leaving = pool.submit(rank_0.close)
            assert store.get("key", 10) == b"value"
            assert not leaving.done()
        leaving.result()


def test_a_rank_that_stays_cannot_keep_rank_0(job, monkeypatch):
    monkeypatch.setattr(storeserver, "LINGER", 0.01)
    rank_0 = join(job, 0, 2)
    with join(job, 1, 2):
        rank_0.thing.close()


def test_a_message_too_long_for_a_packet_is_refused(job):
    with join(job, 0, 1) as store, pytest.raises(ArgumentError, match="65536"):
        store.set("key", bytes(1 << 17))


def test_the_second_start_of_a_job_does_not_meet_the_first(job, monkeypatch):
    monkeypatch.setattr("ringcomm.store._starts", itertools.count())
    for number in range(2):
        with open_store(Place(0, 2, job), 20) as store, join(f"{job}#{number}", 1, 2) as other:
            store.set("key", b"%d" % number)
            assert other.get("key", 20) == b"%d" % number


def test_one_rank_needs_no_socket(job):
    with open_store(Place(0, 1, job), 1) as store:
        store.set("key", b"value")
        assert store.get("key", 1) == b"value"
    assert job not in Path("/proc/net/unix").read_text()
