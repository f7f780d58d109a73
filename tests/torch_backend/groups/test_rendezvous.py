"""Where a start is served, as rank 0 puts it into a store of torch, and as the others find it there."""

import json
import socket
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import harness
from harness.failures import raised
from ringcomm.bootstrap import client, rendezvous, torch_start
from ringcomm.bootstrap import store as store_module
from ringcomm.bootstrap.place import UNIX, host_id
from ringcomm.bootstrap.processes import process_id
from ringcomm.bootstrap.rendezvous import Rendezvous
from ringcomm.bootstrap.wire import addresses
from ringcomm.bootstrap.wire.handshake import HANDSHAKE_TIMEOUT
from ringcomm.bootstrap.wire.keepalive import patience_with
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, RingcommError, encode_error

CONFIG = Config(timeout=harness.OPERATION)


def started(rank, size, store):
    with torch_start.start_through(store, rank, size, CONFIG) as start:
        return start.hosts


def start(store, size=2, call=started):
    """Return what each rank returns, a thread of this process."""
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(lambda rank: call(rank, size, store), range(size))]


def test_ranks_that_cannot_reach_the_host_of_rank_0_say_so_at_once_on_all(monkeypatch):
    here = threading.local()

    def on_a_host_of_its_own(rank, *place):
        here.id = str(rank)
        return raised(ArgumentError, lambda: started(rank, *place))

    monkeypatch.setattr(store_module, "LATE", 0.01)
    monkeypatch.setattr(rendezvous, "host_id", lambda: here.id)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    expected = "rank 0: the other hosts cannot reach this one at 127.0.0.1, the address of '127.0.0.1': set RINGCOMM_HO"
    for error in start(dist.HashStore(), call=on_a_host_of_its_own):
        assert expected in str(error)
        assert error.rank == 0


@pytest.mark.parametrize(("address", "port"), [("no such host", "1"), ("localhost", "none"), ("localhost", "-1")])
def test_a_master_that_nothing_reaches_does_not_end_a_start_on_one_host(monkeypatch, address, port):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    assert start(dist.HashStore()) == [False, False]


@pytest.mark.parametrize(
    ("failure", "kind", "told"),
    [
        (RingcommError("no thread"), RingcommError, "no thread"),
        (OSError("no socket"), Aborted, r"rank 0 aborted startup: OSError('no socket')"),
    ],
)
def test_all_are_told_why_rank_0_cannot_serve(monkeypatch, failure, kind, told):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(rendezvous, "Server", fail)
    mine, its = start(dist.HashStore(), call=lambda *place: raised((RingcommError, OSError), lambda: started(*place)))
    assert mine is failure
    assert type(its) is kind
    assert str(its) == told


def test_a_rank_whose_connection_ends_before_it_has_joined_tries_again(monkeypatch):
    connect, connections = Rendezvous.connect, []

    def connect_and_break_the_first(*args):
        connections.append(connect(*args))
        if len(connections) == 1:
            connections[0].shutdown(socket.SHUT_RDWR)
        return connections[-1]

    monkeypatch.setattr(Rendezvous, "connect", connect_and_break_the_first)
    assert start(dist.HashStore()) == [False, False]
    assert len(connections) == 3


def test_rank_0_listens_at_a_unix_socket_where_only_its_host_reaches_it(monkeypatch):
    def address():
        store = dist.HashStore()
        start(store)
        return json.loads(store.get(rendezvous.KEY))["address"]

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert address().startswith(UNIX)
    monkeypatch.setattr(addresses, "loopback", lambda _: "")
    assert address().startswith("127.0.0.1:")


def test_both_ends_watch_a_connection_for_as_long_as_the_setting_says(monkeypatch):
    def patience(connected):
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    monkeypatch.setattr(addresses, "loopback", lambda _: "")
    config, store = Config(keepalive=77.0, host_address="127.0.0.1"), dist.HashStore()
    server = Rendezvous(store, "", 0, 2, config).serve()
    with Rendezvous(store, "", 1, 2, config).connect(harness.OPERATION) as peer:
        assert patience(peer) == int(1000 * patience_with(77.0).resending)
        assert server._peers._gate._keepalive == 77.0
    server.close()


class CountingStore(dist.Store):
    """A store of torch that counts the values it takes and gives; `check` is called as often as time passes."""

    def __init__(self, values=()):
        super().__init__()
        self._store, self.requests = dist.HashStore(), Counter()
        self.check = self._store.check
        for key, value in values:
            self._store.set(key, value)

    def set(self, key, value):
        self.requests["set"] += 1
        self._store.set(key, value)

    def get(self, key):
        self.requests["get"] += 1
        return self._store.get(key)


def test_each_rank_asks_a_store_of_torch_once():
    size, store = 9, CountingStore()
    assert start(store, size) == [False] * size
    assert store.requests == {"set": 1, "get": size}


def left_behind(**more):
    """Return what an earlier start has left in a store."""
    return {"address": "switched off:1", "secret": uuid.uuid4().hex, "host": "another", "process": "", **more}


def test_a_rank_that_has_found_an_old_start_looks_seldom_and_attempts_are_short_at_first(monkeypatch):
    now, timeouts = 0.0, []

    def sleep(seconds):
        nonlocal now
        now += seconds

    def refuse(_, seconds):
        timeouts.append(seconds)
        raise ConnectionRefusedError

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(socket, "create_connection", refuse)
    store = CountingStore([(rendezvous.KEY, json.dumps(left_behind()))])
    config = Config(timeout=100.0)
    raised(CollectiveTimeout, lambda: next(torch_start.start_through(store, 1, 2, config).gen))
    assert now > 99
    assert store.requests["get"] < 220
    assert timeouts[0] == rendezvous.CONNECT_TIMEOUT
    assert max(timeouts) == HANDSHAKE_TIMEOUT


def test_an_attempt_at_a_new_address_is_short_again():
    store = CountingStore([(rendezvous.KEY, json.dumps(left_behind()))])
    rank = Rendezvous(store, "", 1, 2, CONFIG)
    for _ in range(3):
        rank._look()
    assert rank._connect_timeout == 4 * rendezvous.CONNECT_TIMEOUT
    store.set(rendezvous.KEY, json.dumps(left_behind()))
    rank._look()
    assert rank._connect_timeout == rendezvous.CONNECT_TIMEOUT


@pytest.mark.parametrize(
    ("kind", "host", "heard"),
    [
        ("failure", "this", False),
        ("failure", "another", False),
        ("elsewhere", "another", False),
        ("elsewhere", "another", True),
    ],
)
def test_why_an_earlier_start_has_failed_is_the_error_of_no_other(kind, host, heard):
    """That its rank 0 runs is known of no process of another host, nor of one that has ended."""
    ended = process_id().rpartition(" ")[0] + " 1"
    where = {"host": host_id(), "process": ended} if host == "this" else {"host": host, "process": process_id()}
    left = left_behind(**where, **{kind: encode_error(RingcommError("the reason"))})
    store = CountingStore([(rendezvous.KEY, json.dumps(left))])
    rank = Rendezvous(store, "", 1, 2, CONFIG)
    rank.secret = left["secret"]
    if heard:
        store.set(rank._heard_key, "")
    assert str(raised(ConnectionError, lambda: rank.connect(1.0))) == "a start has failed there: the reason"
    assert start(store) == [False, False]
