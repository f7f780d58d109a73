"""Connections that ranks on several hosts make after the start."""

import logging
import os
import random
import resource
import socket
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from cases.meshes import HOSTS, REACH, SECRET, TIMEOUT, check_connected, serve_until, unanswering_listener
from ringcomm import RingcommError
from ringcomm.bootstrap.wire import peers
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.unix import close_descriptors
from ringcomm.machine import descriptors
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.mesh import Mesh
from ringcomm.transports.network.search import RUNS

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


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
def two_meshes():
    """Yield those of ranks 1 and 2, which are not connected."""
    with ExitStack() as opened:
        meshes = [
            opened.enter_context(closing(Mesh(layout_of(rank, HOSTS), (), REACH, SECRET, KEEPALIVE))) for rank in (1, 2)
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
            for peer in mesh.take().values():
                taken[mesh.rank].append(opened.enter_context(socket.socket(fileno=peer.detach())))
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
            for peer in mesh.take().values():
                peer.close()


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
