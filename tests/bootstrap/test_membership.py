"""The membership of elastic jobs: which ranks have come, who gets the plan, and a server that is slow."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

import harness
from harness.failures import until
from harness.nodes import SECRET, store_server
from ringcomm import CollectiveTimeout, PeerLost
from ringcomm.bootstrap import client, server
from ringcomm.bootstrap.client import Client
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.member_store import MemberStore
from ringcomm.bootstrap.membership import TOO_LATE, Membership
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host
from ringcomm.bootstrap.session import MEMBERS
from ringcomm.bootstrap.store import job_store
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE

SIZE = 4


@pytest.fixture(params=["one host", "several hosts"])
def place(request):
    """Return the place of a rank of a job whose launcher serves its membership."""
    with ExitStack() as stack:
        if request.param == "one host":
            job = stack.enter_context(serve_one_host(Place(0, SIZE, "job", SECRET)))
            address = job.store
        else:
            address = stack.enter_context(store_server())
        yield lambda rank: Place(rank, SIZE, "job", SECRET, store=address, members=tuple(range(SIZE)))


def member_of(place):
    return closing(Membership(place, harness.OPERATION, KEEPALIVE))


@pytest.fixture
def registered(place):
    """Rank 0, registered; a joiner waits as long as any rank is."""
    with member_of(place(0)) as membership:
        membership.register(os.getpid(), joined=True)
        yield membership


def join(place):
    with member_of(place) as joiner:
        return joiner.join(harness.OPERATION)


def lead(membership, missing, timeout=harness.OPERATION, check=lambda: None):
    return membership.plan([0], set(missing), timeout, check)


def test_a_joiner_that_dies_and_comes_again_gets_the_plan(place, registered):
    came = threading.Event()
    with ThreadPoolExecutor() as pool:
        with Client(find_endpoint(place(1)), MEMBERS, place(1), harness.OPERATION) as dead:
            dead.set("join/1/the request of the dead", b"")
            found = pool.submit(lead, registered, [1, 3], check=came.set)
            assert came.wait(harness.OPERATION)  # rank 0 has seen that request
        answers = [pool.submit(join, place(rank)) for rank in (3, 1)]
        plan = found.result(harness.OPERATION)
        assert plan["ranks"] == [0, 1, 3]
        assert [answer.result(harness.OPERATION) for answer in answers] == [plan, plan]


def test_a_wait_for_joiners_ends_with_the_communicator(registered):
    start = time.monotonic()
    with pytest.raises(PeerLost, match="what ends the wait"):
        lead(registered, [1], check=ends_the_wait)
    assert time.monotonic() - start < harness.OPERATION / 2


def test_a_plan_has_room_for_thousands_of_ranks(place, registered):
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(join, place(1))
        plan = registered.plan([0, *range(2, 5000)], {1}, harness.OPERATION, lambda: None)
        assert answer.result(harness.OPERATION) == plan
    assert registered.find_plan(plan["job"], lambda: None)["ranks"] == [*range(5000)]


def test_a_plan_that_is_withdrawn_is_not_waited_for_longer_than_the_communicator(registered, monkeypatch):
    with pytest.raises(PeerLost, match="what ends the wait"):
        registered.find_plan("job", ends_the_wait)
    monkeypatch.setattr("ringcomm.bootstrap.membership.RECONNECT_TIMEOUT", 0.1)
    with pytest.raises(CollectiveTimeout, match="rank 0 may have withdrawn it"):
        registered.find_plan("job", lambda: None)


def test_who_was_removed_is_not_waited_for(place, registered):
    with Client(find_endpoint(place(3)), MEMBERS, place(3), harness.OPERATION) as launcher:
        launcher.tell("keep", key="removed/1")
        launcher.check(ask=True)
        assert lead(registered, [1])["ranks"] == [0]


FORKS = """
import os, sys
from ringcomm.bootstrap.membership import Membership
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import serve_one_host

with serve_one_host(Place(0, 2, f"job of {os.getpid()}", "secret")) as place:
    (lives, ends), (runs, forked) = os.pipe(), os.pipe()
    first = Membership(place, 20, 15.0)
    first.register(os.getpid(), joined=True)
    if not os.fork():
        os.close(ends)
        os.write(forked, b"1")
        os.read(lives, 1)  # until the parent has ended
        os._exit(0)
    os.read(runs, 1)
    first._store._socket.close()
    second = Membership(place, 20, 15.0)
    while second._store.keys("member/"):
        pass
    print("it is gone")
"""


def test_a_forked_child_does_not_hold_the_place_of_its_parent():
    command = [sys.executable, "-c", FORKS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=harness.JOB, check=False)
    assert ended.stdout == "it is gone\n", ended.stderr


def test_the_server_keeps_a_plan_until_the_next_call(place, registered):
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(join, place(1))
        plan = lead(registered, [1])
        assert plan == answer.result(harness.OPERATION) == registered.find_plan(plan["job"], lambda: None)
    assert len(registered._store.keys("plan/")) == 2  # of the joiner, and of the members
    lead(registered, [], 0)
    assert not registered._store.keys("plan/")
    assert not registered._store.keys("join/")


def test_a_joiner_that_none_can_take_in_ends_at_once(place):
    with pytest.raises(SystemExit) as raised:
        join(place(1))
    assert raised.value.code == TOO_LATE


def test_a_start_ends_when_a_rank_is_lost_that_it_awaits(place, registered):
    registered.close()  # which is no loss
    with member_of(place(2)) as lost, member_of(place(3)) as other:
        lost.register(os.getpid(), joined=True)
        lost._store._socket.shutdown(socket.SHUT_RDWR)  # as if it had died
        until(lambda: not other._store.keys("member/"), "the loss")
    with (
        pytest.raises(PeerLost, match=r"^rank 2 \(process .*\) exited during startup$"),
        job_store(place(1), harness.OPERATION) as store,
    ):
        store.find("never set", harness.OPERATION)
    unknown = replace(place(1), job="of ranks that it does not know", members=())
    with job_store(unknown, harness.OPERATION) as store:
        assert store.find("never set", 0.1) is None


def test_a_slow_server_is_not_the_end_of_the_job(place, registered, monkeypatch):
    take, slow = MemberStore.take, threading.Event()

    def take_slowly(self, peer, message):
        if message.kind == "keys" and not slow.is_set():
            slow.set()
            time.sleep(1)  # longer than a client waits
        return take(self, peer, message)

    with member_of(place(1)) as joiner, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(joiner._store, "_patience", 0.2)
        monkeypatch.setattr(MemberStore, "take", take_slowly)
        answer = pool.submit(joiner.join, harness.OPERATION)
        assert slow.wait(harness.OPERATION)
        assert lead(registered, [1]) == answer.result(harness.OPERATION)


def test_a_server_keeps_only_the_failure_of_the_last_starts_that_failed(monkeypatch):
    monkeypatch.setattr(server, "FAILED_STARTS", 2)
    names = [f"start {number}" for number in range(4)]
    with store_server() as address:
        serving = next(thread for thread in threading.enumerate() if isinstance(thread, server.Server))
        for name in names:
            place = Place(0, 2, name, SECRET, store=address)
            with Client(find_endpoint(place), name, place, 20) as store:
                store.abort(PeerLost(name))
        late = Place(1, 2, names[-1], SECRET, store=address)
        with pytest.raises(PeerLost, match=names[-1]):
            Client(find_endpoint(late), late.job, late, 20)
        # All ranks of the last one have heard of its failure.
        until(lambda: [*serving._starts] == names[-2:-1], "the server keeps one start")


def test_of_the_starts_that_failed_the_last_to_fail_is_kept(monkeypatch):
    monkeypatch.setattr(server, "FAILED_STARTS", 1)
    with store_server() as address, ExitStack() as stack:
        first, second = places = [Place(0, 3, name, SECRET, store=address) for name in ("first", "second")]
        stores = [stack.enter_context(Client(find_endpoint(each), each.job, each, 20)) for each in places]
        for store, place in zip(reversed(stores), (second, first), strict=True):
            store.abort(PeerLost(place.job))
            with pytest.raises(PeerLost, match=place.job):
                store.check(ask=True)
            store.close()
        late = replace(first, rank=1)
        with pytest.raises(PeerLost, match="first"):
            Client(find_endpoint(late), late.job, late, 20)


def test_a_watcher_that_reads_late_misses_no_change(place):
    seen = []
    changes = range(3000)  # more than the buffers of a socket hold
    with (
        Client(
            find_endpoint(place(3)), MEMBERS, place(3), 20, watch=lambda it: seen.append(it.fields["key"])
        ) as watcher,
        Client(find_endpoint(place(0)), MEMBERS, place(0), 20) as busy,
    ):
        for number in changes:
            busy.set(f"key/{number}", b"")
        busy.check(ask=True)
        watcher.check(ask=True)
    assert seen == [f"key/{number}" for number in changes]


def test_the_question_that_a_client_gave_up_does_not_answer_the_next(place):
    with Client(find_endpoint(place(0)), MEMBERS, place(0), 20) as store:
        with pytest.raises(PeerLost, match="what ends the wait"):
            store.find("never set", 0.3, ends_the_wait)
        store.set("never set", b"late")
        store.set("key", b"value")
        assert store.find("key", 20) == b"value"
    assert client.SLICE < 0.3


def ends_the_wait():
    raise PeerLost("what ends the wait")
