"""The connections between the ranks of several hosts: complete, authenticated, whoever else connects."""

import json
import logging
import os
import random
import resource
import secrets
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from harness.failures import until
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, RingcommError
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.store import HashStore
from ringcomm.bootstrap.wire import peers, tcp
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE, client_handshake
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE, patience_with
from ringcomm.bootstrap.wire.tcp import local_address, split_address
from ringcomm.bootstrap.wire.unix import close_descriptors
from ringcomm.machine import descriptors
from ringcomm.native import ffi
from ringcomm.transports.network.layout import layout_of
from ringcomm.transports.network.mesh import ADDRESSES, Mesh, connect_mesh
from ringcomm.transports.network.search import LEFT, RUNS
from ringcomm.transports.network.sockets import open_link

TIMEOUT = 20.0
SECRET = b"secret"
LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(9) as pool:
        yield pool


def connect_all(rank, size, store, address=LOCAL, secret=SECRET, keepalive=KEEPALIVE, timeout=TIMEOUT):
    """Connect ranks of which each is on a host of its own."""
    return connect_mesh(layout_of(rank, range(size)), store, [address], secret, keepalive, timeout)


def start(pool, store, ranks, size, *address, **options):
    return [pool.submit(connect_all, rank, size, store, *address, **options) for rank in ranks]


def server_of(store, rank):
    until(lambda: rank in store._facts.get(ADDRESSES, ()), f"the address of rank {rank}")
    return split_address(json.loads(store._facts[ADDRESSES][rank]))


def connect(store, rank):
    peer = socket.create_connection(server_of(store, rank), TIMEOUT)
    peer.settimeout(TIMEOUT)
    return peer


def finish(started):
    """Check that each rank has a connection to each other one, and close them."""
    meshes = [future.result() for future in started]
    size = len(meshes)
    check_connected(meshes, {(rank, other) for rank in range(size) for other in range(size) if rank != other})
    for mesh in meshes:
        mesh.close()


def check_connected(meshes, pairs):
    """Check which pairs have a connection that nobody has taken, that each works, and close them."""
    with ExitStack() as opened:
        sockets = {
            (rank, other): opened.enter_context(socket.socket(fileno=fd))
            for rank, mesh in enumerate(meshes)
            for other, fd in mesh.take().items()
        }
        assert sockets.keys() == pairs
        assert not any(os.get_blocking(each.fileno()) for each in sockets.values())
        for (rank, other), connected in sockets.items():
            connected.send(bytes([rank, other]))
        for (rank, other), connected in sockets.items():
            connected.settimeout(TIMEOUT)
            assert connected.recv(10) == bytes([other, rank])  # and nothing of the handshake


@pytest.mark.parametrize("address", [LOCAL, "::1"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_two_ranks_are_connected_and_nothing_listens_once_the_meshes_are_closed(store, pool, size, address):
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"{address}: {error.strerror}")
    finish(start(pool, store, range(size), size, address))
    for rank in range(size):
        with pytest.raises(ConnectionRefusedError):
            connect(store, rank)


def test_the_ranks_start_in_any_order(store, pool):
    finish([*reversed(start(pool, store, [2, 1, 0], 3))])


def secret_of(rank):
    return SECRET + struct.pack("!I", rank)


def prove_wrongly(peer):
    """Answer the challenge with a proof of another secret."""
    with pytest.raises(ConnectionError, match="another secret"):
        talk(peer, b"another")


def talk(peer, secret, rank=0, listening=0, flow=0):
    """Prove the secret and send a rank; return the connection."""
    with ExitStack() as failed:
        peer = failed.enter_context(MessageSocket(peer))
        peer.settimeout(TIMEOUT)
        steps = client_handshake(secret)
        next(steps)
        with suppress(StopIteration):
            while True:
                peer.send(steps.send(peer.recv(MESSAGE_OF_HANDSHAKE)))
        peer.send(struct.pack("!III", rank, listening, flow))
        failed.pop_all()
    return peer


def send_garbage(peer):
    peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)


def disconnect(peer):
    peer.close()


def be_silent(peer):
    pass


UNTRUSTED_PEERS = [send_garbage, disconnect, be_silent, prove_wrongly]


@pytest.mark.parametrize("act", UNTRUSTED_PEERS)
def test_untrusted_peers_do_not_hold_up_the_ranks(store, pool, act, caplog):
    with caplog.at_level(logging.WARNING, "ringcomm"), ExitStack() as opened:
        early = start(pool, store, [0, 1], 3)
        for rank in (0, 1):
            act(opened.enter_context(connect(store, rank)))
        finish(early + start(pool, store, [2], 3))
    if act in (send_garbage, prove_wrongly):
        assert "refused 127.0.0.1 port" in caplog.text


def test_of_many_untrusted_peers_the_oldest_is_dropped(store, pool, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_UNTRUSTED", 3)
    with ExitStack() as opened:
        early = start(pool, store, [0], 2)
        peers = [opened.enter_context(connect(store, 0)) for _ in range(5)]
        for peer in peers[:2]:
            await_end(peer)
        finish(early + start(pool, store, [1], 2))


def test_a_silent_untrusted_peer_is_dropped_in_time(store, pool, monkeypatch):
    early = start(pool, store, [0], 2)
    server_of(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "HANDSHAKE_TIMEOUT", 0.05)
        with connect(store, 0) as peer:
            await_end(peer)
    finish(early + start(pool, store, [1], 2))


def await_end(peer):
    while peer.recv(1000):
        pass


def test_a_process_that_knows_the_secret_must_be_another_rank(store, pool, caplog):
    early = start(pool, store, [0], 2)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        for rank in (0, 2):
            with talk(connect(store, 0), secret_of(0), rank) as peer:
                assert peer.recv(1) == b""
        finish(early + start(pool, store, [1], 2))
    assert "it sent no number of another rank" in caplog.text


def test_a_rank_may_connect_again(store, pool):
    early = start(pool, store, [0], 3)
    with talk(connect(store, 0), secret_of(0), rank=1) as first:
        assert first.recv(5) == b"taken"
        store.all_gather(Contribution(ADDRESSES, 2, 3, b'""'), 0.0)  # no rank connects to the last one
        again = start(pool, store, [1], 3)
        assert first.recv(1) == b""
    finish(early + again + start(pool, store, [2], 3))


def test_a_flow_does_not_take_the_place_of_a_connection(store, pool):
    early = start(pool, store, [0], 2)
    with talk(connect(store, 0), secret_of(0), rank=1, flow=1) as flow:
        assert flow.recv(5) == b""
    finish(early + start(pool, store, [1], 2))


def test_missing_ranks_are_named(store, pool):
    for started in start(pool, store, [0, 1, 2], 5, timeout=1):
        with pytest.raises(
            CollectiveTimeout, match=r"^timed out: ranks 3 and 4 of 5 did not arrive within 1 s$"
        ) as raised:
            started.result()
        assert raised.value.rank == 3


def test_without_rank_0_no_rank_connects(store):
    with pytest.raises(CollectiveTimeout, match=r"^timed out: rank 0 of 2 did not arrive within 0\.2 s$"):
        connect_all(1, 2, store, timeout=0.2)


def test_a_rank_that_is_taken_for_another_is_not_connected_to(store, pool):
    started = start(pool, store, [0, 1], 3, timeout=1)
    with pytest.raises(ConnectionError, match="another secret"):
        talk(connect(store, 1), secret_of(0), rank=2)
    for each in started:
        with pytest.raises(CollectiveTimeout, match=r"^timed out: rank 2 of 3"):
            each.result()


def test_a_rank_with_another_secret_is_refused_and_told(store, pool):
    started = start(pool, store, [0], 2, timeout=2) + start(pool, store, [1], 2, timeout=2, secret=b"another")
    with pytest.raises(CollectiveTimeout, match=r"^timed out: rank 1 of 2"):
        started[0].result()
    with pytest.raises(CollectiveTimeout, match=r": rank 0 of 2 (.*\n)*rank 0 at 127.*: (it has another secret|Conn)"):
        started[1].result()


def tell(store, address):
    """Publish the addresses of two ranks, that of rank 0 and any, as rank 0 does."""
    for rank, each in enumerate([address, ""]):
        store.all_gather(Contribution(ADDRESSES, rank, 2, json.dumps(each).encode()), 0.0)


@pytest.mark.parametrize(
    ("greeting", "reason"), [(b"", "it closed the connection"), (b"SSH-2.0\r\n" * 99, "Message too long")]
)
def test_a_lower_rank_must_know_the_secret(store, pool, greeting, reason):
    with socket.create_server((LOCAL, 0)) as server:
        tell(store, f"{LOCAL}:{server.getsockname()[1]}")

        def impersonate():
            with suppress(OSError):  # the test has ended
                while True:
                    peer, _ = server.accept()
                    with peer:
                        peer.sendall(greeting)

        impersonating = pool.submit(impersonate)
        with pytest.raises(CollectiveTimeout, match=f"rank 0 at 127.*: {reason}"):
            connect_all(1, 2, store, timeout=1)
        server.shutdown(socket.SHUT_RDWR)
        impersonating.result()


def test_the_reason_why_a_rank_cannot_be_reached_is_given(store):
    tell(store, "255.255.255.255:1")  # fails at once
    with pytest.raises(CollectiveTimeout, match=r"rank 0 at 255\.255\.255\.255:1: \w+"):
        connect_all(1, 2, store, timeout=0.2)


def test_the_failure_of_another_rank_ends_the_wait(store, pool):
    started = start(pool, store, [0, 1], 3)
    for rank in (0, 1):
        server_of(store, rank)
    store.abort(Aborted("no more", rank=2))
    for each in started:
        with pytest.raises(Aborted, match="no more"):
            each.result()


def test_a_signal_ends_the_wait(store, pool):
    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    def interrupt():
        server_of(store, 0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        interrupting = pool.submit(interrupt)
        with pytest.raises(Interrupted):
            connect_all(0, 2, store)
        interrupting.result()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_the_address_must_be_one_of_this_host(store):
    with pytest.raises(
        ArgumentError, match=r"rank 0: the address of this host \(RINGCOMM_HOST_ADDRESS\): expected one"
    ):
        connect_all(0, 2, store, "0.0.0.0")
    with pytest.raises(
        ArgumentError, match=r"rank 0: the address of this host \(RINGCOMM_HOST_ADDRESS\): cannot listen at 192"
    ):
        connect_all(0, 2, store, "192.0.2.1")


def test_the_local_address_is_that_of_the_route():
    assert local_address("127.0.0.1:1") == LOCAL


# --- After the start --------------------------------------------------------------------------------------------------

HOSTS = "0011"  # its rails are connected: ranks 0 and 2, 1 and 3


@pytest.fixture
def meshes(store, pool):
    """Connect the rails, which are in use from then on."""

    def begin(rank):
        return connect_mesh(layout_of(rank, HOSTS), store, [LOCAL], SECRET, KEEPALIVE, TIMEOUT)

    with ExitStack() as opened:
        begun = [pool.submit(begin, rank) for rank in range(4)]
        found = [opened.enter_context(closing(each.result())) for each in begun]
        check_connected(found, {(0, 2), (2, 0), (1, 3), (3, 1)})
        states = {}
        for mesh in found:
            mesh.find_ended(lambda rank: states.get(rank, RUNS))
        yield found, states


def serve_until(meshes, done, what):
    def serve():
        for mesh in meshes:
            mesh.serve(0)
        return done()

    until(serve, what)


def test_two_ranks_connect_later_from_either_end(meshes):
    meshes, _ = meshes
    for connecting, listening in ((1, 2), (3, 0)):
        ends = meshes[connecting], meshes[listening]
        ends[0].connect_to(listening)
        serve_until(meshes, lambda ends=ends: all(each.connected for each in ends), "both ends")
        check_connected(meshes, {(connecting, listening), (listening, connecting)})
        ends[0].connect_to(listening)
        ends[1].connect_to(connecting)
        for mesh in meshes:
            mesh.serve(0.01)
        check_connected(meshes, set())


@contextmanager
def unanswering_listener():
    """Yield the address of a listener whose queue is full: the kernel answers no further attempt to connect."""
    with ExitStack() as opened:
        silent = opened.enter_context(socket.create_server((LOCAL, 0), backlog=0))
        for _ in range(3):
            queued = opened.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(silent.getsockname())
        yield f"{LOCAL}:{silent.getsockname()[1]}"


@contextmanager
def two_meshes():
    """Yield those of ranks 1 and 2, which are not connected."""
    with ExitStack() as opened:
        meshes = [
            opened.enter_context(closing(Mesh(layout_of(rank, HOSTS), (), [LOCAL], SECRET, KEEPALIVE)))
            for rank in (1, 2)
        ]
        for mesh in meshes:
            mesh.addresses = [[""], meshes[0].own, meshes[1].own, [""]]
            mesh.find_ended(lambda _: RUNS)
        yield meshes


def test_of_two_connections_at_once_both_ends_have_the_same_one(caplog):
    with caplog.at_level(logging.WARNING, "ringcomm"):
        for seed in range(200):
            connect_both(random.Random(seed))
    assert not caplog.records


def connect_both(order):
    """The two ranks begin and go on in any order, and a connection is in use at once."""
    with two_meshes() as meshes, ExitStack() as opened:
        taken = {1: [], 2: []}
        steps = {rank: order.randrange(6) for rank in taken}  # until it begins
        while max(steps.values()) >= 0 or any(mesh._attempts or mesh._searches for mesh in meshes):
            mesh = order.choice(meshes)
            if steps[mesh.rank] == 0:
                mesh.connect_to(3 - mesh.rank)
            steps[mesh.rank] -= 1
            mesh.serve(order.choice([0, 0, 0.001]))
            taken[mesh.rank] += [opened.enter_context(socket.socket(fileno=fd)) for fd in mesh.take().values()]
        assert [len(found) for found in taken.values()] == [1, 1]
        (one,), (other,) = taken.values()
        one.settimeout(TIMEOUT)
        other.send(b"x")
        assert one.recv(10) == b"x"


def test_the_lower_rank_connects_where_the_higher_one_is_not_answered():
    with two_meshes() as meshes, unanswering_listener() as address:
        lower, higher = meshes
        higher.addresses[1] = [address]
        higher.connect_to(1)
        higher.serve(0)
        lower.connect_to(2)
        serve_until(meshes, lambda: lower.connected and higher.connected, "the connection")
        assert not higher._attempts
        for mesh in meshes:
            close_descriptors(mesh.take().values())


# --- Ranks that cannot be reached -------------------------------------------------------------------------------------


def search(meshes, by, rank):
    """Return what becomes of the search of one rank for another."""
    (ours,) = [mesh for mesh in meshes if mesh.rank == by]
    ours.connect_to(rank)
    serve_until(meshes, lambda: ours.ended or ours.connected, f"what has become of rank {rank}")
    assert not ours._searches
    return ours.ended.get(rank)


@pytest.mark.parametrize("state", [LEFT, b"process 123 died"])
def test_another_rank_of_its_host_says_what_has_become_of_one_that_does_not_listen(meshes, state):
    meshes, states = meshes
    states[3] = state
    meshes.pop().close()
    assert search(meshes, 0, 3) == state


def test_a_rank_that_refuses_but_runs_is_tried_again(meshes):
    meshes, states = meshes
    meshes.pop().close()
    meshes[0].connect_to(3)
    serve_until(meshes, lambda: 3 in meshes[0].failures, "a refusal")
    for _ in range(20):
        serve_until(meshes, lambda: meshes[0]._attempts, "another attempt")
        serve_until(meshes, lambda: not meshes[0]._attempts, "its end")
        assert not meshes[0].ended
    states[3] = LEFT
    assert search(meshes, 0, 3) == LEFT


def test_a_host_on_which_nobody_listens_any_more_has_left(meshes):
    meshes, _ = meshes
    for _ in range(2):
        meshes.pop().close()
    assert search(meshes, 0, 3) == LEFT


@pytest.mark.parametrize("greeting", [b"SSH-2.0\r\n" * 99, b""])
def test_a_stranger_at_the_address_of_a_rank_that_has_ended_is_no_rank(meshes, pool, greeting, monkeypatch):
    meshes, states = meshes
    states[3] = LEFT
    meshes.pop().close()
    monkeypatch.setattr("ringcomm.transports.network.search.HANDSHAKE_TIMEOUT", 0.05)

    def greet():
        peer, _ = server.accept()
        with peer:
            peer.sendall(greeting)
            await_end(peer)

    with socket.create_server((LOCAL, 0)) as server:
        meshes[0].addresses[3] = [f"{LOCAL}:{server.getsockname()[1]}"]
        greeted = pool.submit(greet)
        assert search(meshes, 0, 3) == LEFT
        with suppress(ConnectionError):
            greeted.result()


def test_a_silent_host_is_lost_in_time(meshes, monkeypatch):
    meshes, _ = meshes
    mesh = meshes[0]
    monkeypatch.setattr(mesh, "_keepalive", 0.001)
    with unanswering_listener() as address:
        mesh.addresses[2:] = [[address]] * 2
        begin = time.monotonic()
        assert search(meshes, 0, 3) == f"no connection at {address}: Connection timed out".encode()
    assert patience_with(0.001).idle <= time.monotonic() - begin < TIMEOUT / 2


def test_a_silent_listener_is_no_lost_host(meshes, monkeypatch):
    """A rank that is stopped, or holds the lock of its interpreter, still has its host."""
    meshes, _ = meshes
    monkeypatch.setattr("ringcomm.transports.network.search.HANDSHAKE_TIMEOUT", 0.05)
    mesh, stopped = meshes[0], meshes.pop()
    monkeypatch.setattr(mesh, "_keepalive", 0.001)
    mesh.connect_to(3)
    until_tried = time.monotonic() + patience_with(0.001).idle + 0.1
    serve_until(meshes, lambda: time.monotonic() > until_tried, "the patience with a silent host")
    assert not mesh.ended
    serve_until([*meshes, stopped], lambda: mesh.connected and stopped.connected, "the connection")
    check_connected([*meshes, stopped], {(0, 3), (3, 0)})


# --- Limits -----------------------------------------------------------------------------------------------------------


@contextmanager
def no_descriptor_left(monkeypatch):
    monkeypatch.setattr(descriptors, "raise_limit", lambda: False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_descriptors(taken)


def test_a_start_provides_descriptors_for_the_neighbors_only(store, pool, monkeypatch):
    provided = []
    monkeypatch.setattr(descriptors, "provide_connections", lambda *needed: provided.append(needed))
    layouts = [layout_of(rank, "000111222") for rank in range(9)]
    started = [pool.submit(connect_mesh, each, store, [LOCAL], SECRET, KEEPALIVE, TIMEOUT) for each in layouts]
    for each in started:
        each.result().close()
    assert sorted(provided) == [(rank, 2) for rank in range(9)]


def test_a_mesh_that_had_no_descriptor_left_accepts_ranks_later(meshes, monkeypatch, caplog):
    meshes, _ = meshes
    monkeypatch.setattr(peers, "INTERVAL", 0.05)
    meshes[1].connect_to(2)
    meshes[1].serve(0)
    with caplog.at_level(logging.WARNING, "ringcomm"), no_descriptor_left(monkeypatch):
        meshes[2].serve(TIMEOUT)
    assert "rank 2 has no file descriptor left to accept another rank" in caplog.text
    serve_until(meshes, lambda: meshes[1].connected and meshes[2].connected, "the connection")
    check_connected(meshes, {(1, 2), (2, 1)})


def test_a_mesh_without_a_descriptor_to_connect_says_so(meshes, monkeypatch):
    meshes, _ = meshes
    meshes[1].connect_to(2)
    with (
        no_descriptor_left(monkeypatch),
        pytest.raises(RingcommError, match=r"^rank 1 has no file descriptor left to connect to another rank") as raised,
    ):
        meshes[1].serve(0)
    assert raised.value.rank == 1


@pytest.mark.parametrize("keepalive", [0.0001, 1, 2, 4, 5, 6, 15, 100, 86400])
def test_an_idle_connection_ends_after_keepalive_and_not_before(pool, store, keepalive):
    with ExitStack() as opened:
        started = start(pool, store, range(2), 2, keepalive=keepalive)
        ours, theirs = [opened.enter_context(closing(future.result())) for future in started]
        opened.enter_context(socket.socket(fileno=theirs.take()[0]))
        probed = opened.enter_context(socket.socket(fileno=os.dup(ours.connected[1])))
        link = open_link(ours, secrets.token_hex(8), keepalive)
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, probes = (probed.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        ffi.release(link)
    assert keepalive <= idle + probes * interval < keepalive + 3 + interval
    assert interval < max(1, keepalive / 100) + 1  # or a short outage would take most of the probes
