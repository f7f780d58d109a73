"""The connections between the ranks of several hosts: complete, authenticated, whoever else connects."""

import json
import logging
import os
import secrets
import signal
import socket
import struct
import threading
from contextlib import ExitStack, closing, suppress

import pytest

from cases.meshes import LOCAL, REACH, SECRET, TIMEOUT, await_end, check_connected
from harness.failures import until
from ringcomm import Aborted, ArgumentError, CollectiveTimeout
from ringcomm.bootstrap.session import Contribution
from ringcomm.bootstrap.wire import tcp
from ringcomm.bootstrap.wire.addresses import Reach, local_address, split_address
from ringcomm.bootstrap.wire.framing import MessageSocket
from ringcomm.bootstrap.wire.handshake import MESSAGE_OF_HANDSHAKE, client_handshake
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.machine import descriptors
from ringcomm.native import ffi
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.sockets import ADDRESSES, connect_mesh, open_link

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


def connect_all(rank, size, store, address=LOCAL, secret=SECRET, keepalive=KEEPALIVE, timeout=TIMEOUT):
    """Connect ranks of which each is on a host of its own."""
    return connect_mesh(layout_of(rank, range(size)), store, Reach([address], [address]), secret, keepalive, timeout)


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
        steps = client_handshake(secret, peer, None)
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
        assert first.recv(8) == b"accepted"
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
    started = start(pool, store, [0], 2, timeout=2) + start(pool, store, [1], 2, timeout=1, secret=b"another")
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


def test_a_start_provides_descriptors_for_the_neighbors_only(store, pool, monkeypatch):
    provided = []
    monkeypatch.setattr(descriptors, "provide_connections", lambda *needed: provided.append(needed))
    layouts = [layout_of(rank, "000111222") for rank in range(9)]
    started = [pool.submit(connect_mesh, each, store, REACH, SECRET, KEEPALIVE, TIMEOUT) for each in layouts]
    for each in started:
        each.result().close()
    assert sorted(provided) == [(rank, 2) for rank in range(9)]


@pytest.mark.parametrize("keepalive", [0.0001, 1, 2, 4, 5, 6, 15, 100, 86400])
def test_an_idle_connection_ends_after_keepalive_and_not_before(pool, store, keepalive):
    with ExitStack() as opened:
        started = start(pool, store, range(2), 2, keepalive=keepalive)
        ours, theirs = [opened.enter_context(closing(future.result())) for future in started]
        opened.enter_context(theirs.take()[0])
        probed = opened.enter_context(socket.socket(fileno=os.dup(ours.connected[1].fileno())))
        link = open_link(ours, secrets.token_hex(8), keepalive)
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, probes = (probed.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        ffi.release(link)
    assert keepalive <= idle + probes * interval < keepalive + 3 + interval
    assert interval < max(1, keepalive / 100) + 1  # or a short outage would take most of the probes
