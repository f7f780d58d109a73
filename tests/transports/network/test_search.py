"""What a rank finds out about another one that it cannot reach."""

import socket
import time
from contextlib import suppress

import pytest

from cases.meshes import LOCAL, TIMEOUT, await_end, check_connected, serve_until, unanswering_listener
from ringcomm.bootstrap.wire.keepalive import patience_with
from ringcomm.transports.network.search import LEFT

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


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


def test_a_server_of_another_secret_at_the_port_of_a_rank_is_no_rank(meshes):
    """RINGCOMM_PORT_RANGE leaves few ports, so another one soon has that of a rank that has ended."""
    meshes, _ = meshes
    for _ in range(2):
        meshes.pop().close()
    meshes[0].addresses[2:] = [meshes[1].own] * 2
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
