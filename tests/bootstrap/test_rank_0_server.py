"""Rank 0 serves the store of a start: as long as the others need it, and no longer."""

import itertools
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from cases.start_stores import SHORTAGE, Rank, check_shortage, join, joined
from harness.failures import PROMPT
from ringcomm import MemoryShortage, PeerLost, RingcommError
from ringcomm.bootstrap import server
from ringcomm.bootstrap import store as store_module
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.store import job_store, open_store
from ringcomm.bootstrap.wire.unix import UnixGate, user_address
from ringcomm.machine import descriptors

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
