"""The membership of elastic jobs: which ranks have come, who gets the plan, and a server that is slow."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import harness
from harness.nodes import SECRET, store_server
from ringcomm import PeerLost
from ringcomm.bootstrap import socketstore, store_membership, tcpstore
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.servedstore import ServedLastingStore
from ringcomm.bootstrap.store_membership import StoreMembership
from ringcomm.bootstrap.tcpstore import LastingStore, TcpStore

PLAN = {"ranks": [0, 1, 3]}


@pytest.fixture
def place():
    with store_server() as address:
        yield lambda rank: Place(rank, 4, "job", SECRET, store=address)


@pytest.fixture
def registered(place):
    """Rank 0, registered; a joiner waits as long as any rank is."""
    with closing(StoreMembership(place(0))) as membership, membership.register():
        yield membership


def request_plan(place):
    with closing(StoreMembership(place)) as joiner:
        return joiner.request_plan(harness.OPERATION)


def test_a_joiner_that_dies_and_comes_again_gets_the_plan(place, registered):
    came = threading.Event()

    def wait(joiners):
        return joiners.wait([1, 3], harness.OPERATION, came.set)

    with ThreadPoolExecutor() as pool, registered.joiners() as joiners:
        with LastingStore(place(1)) as dead:
            dead.set("rank 1 joins", b"the request of the dead")
            found = pool.submit(wait, joiners)
            assert came.wait(harness.OPERATION)  # rank 0 has seen that request
        answers = [pool.submit(request_plan, place(rank)) for rank in (3, 1)]
        assert sorted(rank for rank, _ in found.result(harness.OPERATION)) == [1, 3]
        joiners.send(PLAN)
        assert [answer.result(harness.OPERATION) for answer in answers] == [PLAN, PLAN]


FORKS = """
import os
from ringcomm.bootstrap.local_membership import LocalMembership
from ringcomm.bootstrap.place import Place

membership = LocalMembership(Place(0, 2, f"job of {os.getpid()}", "nonce"))
(lives, ends), (runs, forked) = os.pipe(), os.pipe()
with membership.joiners():
    if not os.fork():
        os.close(ends)
        os.write(forked, b"1")
        os.read(lives, 1)  # until the parent has ended
        os._exit(0)
    os.read(runs, 1)
with membership.joiners():
    print("again")
"""


def test_a_forked_child_does_not_hold_the_address_where_ranks_join():
    command = [sys.executable, "-c", FORKS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=harness.JOB, check=False)
    assert ended.stdout == "again\n", ended.stderr


def test_a_wait_for_joiners_ends_with_the_communicator(registered):
    def check():
        raise PeerLost("rank 2 was lost", rank=2)

    start = time.monotonic()
    with registered.joiners() as joiners, pytest.raises(PeerLost, match="rank 2 was lost"):
        joiners.wait([1], harness.OPERATION, check)
    assert time.monotonic() - start < harness.OPERATION / 2


def test_the_server_keeps_no_plan(place, registered, monkeypatch):
    monkeypatch.setattr(store_membership.secrets, "token_hex", lambda _: "1")
    with ThreadPoolExecutor() as pool:
        with registered.joiners() as joiners:
            answer = pool.submit(request_plan, place(1))
            assert joiners.wait([1], harness.OPERATION, lambda: None)
            joiners.send(PLAN)
            assert answer.result(harness.OPERATION) == PLAN
        with LastingStore(place(1)) as store:
            assert store.find("plan of 1") is None


@pytest.mark.parametrize("first", [True, False])
def test_the_first_to_confirm_decides_for_all(place, first):
    assert StoreMembership(place(0)).confirm("job+1", first) is first
    assert StoreMembership(place(1)).confirm("job+1", not first) is first
    assert StoreMembership(place(1)).confirm("job+2", not first) is not first


def test_a_slow_server_is_not_the_end_of_the_job(place, registered, monkeypatch):
    monkeypatch.setattr(socketstore, "LINGER", 0.2)
    handle, slow = ServedLastingStore.handle, threading.Event()

    def handle_slowly(self, peer, message):
        if message.startswith(b"get") and not slow.is_set():
            slow.set()
            time.sleep(1)  # longer than a client waits
        handle(self, peer, message)

    with closing(StoreMembership(place(1))) as joiner:
        assert joiner.any_registered()
        monkeypatch.setattr(ServedLastingStore, "handle", handle_slowly)
        assert joiner.any_registered()  # as far as it knows
        assert slow.is_set()
        time.sleep(1)  # until the server has caught up
        assert joiner.any_registered()
        slow.clear()
        assert joiner.request_plan(0.1) is None
        assert slow.is_set()
        time.sleep(1)  # until the server has caught up
        with ThreadPoolExecutor() as pool, registered.joiners() as joiners:
            answer = pool.submit(joiner.request_plan, harness.OPERATION)
            assert joiners.wait([1], harness.OPERATION, lambda: None) == [(1, "")]
            joiners.send(PLAN)
            assert answer.result(harness.OPERATION) == PLAN


def test_a_launcher_survives_that_it_cannot_remove_a_rank(monkeypatch):
    monkeypatch.setattr(tcpstore, "REACH_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        membership = StoreMembership(Place(2, 4, "job", SECRET, store=address))
        assert membership.any_registered()  # as far as it knows
        membership.remove(1)


@pytest.mark.usefixtures("registered")
def test_the_launcher_connects_again_after_a_lost_connection(place):
    with closing(StoreMembership(place(2))) as launcher:
        assert launcher.any_registered()
        launcher._kept._socket.shutdown(socket.SHUT_RDWR)
        launcher.any_registered()
        assert launcher.any_registered()


@pytest.mark.usefixtures("registered")
def test_a_launcher_waits_for_an_answer_no_longer_than_its_patience(place, monkeypatch):
    handle, resumed = ServedLastingStore.handle, threading.Event()
    monkeypatch.setattr(ServedLastingStore, "handle", lambda *request: resumed.wait() and handle(*request))
    with closing(StoreMembership(place(2), patience=0.1)) as launcher:
        start = time.monotonic()
        assert launcher.any_registered()  # as far as it knows
        assert time.monotonic() - start < socketstore.LINGER
        resumed.set()


def test_a_server_keeps_only_the_failure_of_the_last_starts_that_failed(monkeypatch):
    monkeypatch.setattr(tcpstore, "FAILED_STARTS", 2)
    names = [f"start {number}" for number in range(4)]
    with store_server() as address:
        server = next(thread for thread in threading.enumerate() if isinstance(thread, tcpstore.TcpStoreServer))
        for name in names:
            with TcpStore(Place(0, 2, name, SECRET, store=address), 20) as store:
                store.abort(PeerLost(name))
        with pytest.raises(PeerLost, match=names[-1]):
            TcpStore(Place(1, 2, names[-1], SECRET, store=address), 20)
        assert (list(server._starts), list(server._failed)) == ([], names[-2:])
