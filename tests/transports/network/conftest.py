"""Meshes between ranks that are threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from cases.certificates import certificates
from cases.meshes import HOSTS, REACH, SECRET, TIMEOUT, check_connected
from ringcomm.bootstrap.store import HashStore
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.search import RUNS
from ringcomm.transports.network.sockets import connect_mesh


@pytest.fixture
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


@pytest.fixture
def meshes(store, pool):
    """Connect the rails, which are in use from then on."""

    def begin(rank):
        return connect_mesh(layout_of(rank, HOSTS), store, REACH, SECRET, KEEPALIVE, TIMEOUT)

    with ExitStack() as opened:
        begun = [pool.submit(begin, rank) for rank in range(4)]
        found = [opened.enter_context(closing(each.result())) for each in begun]
        check_connected(found, {(0, 2), (2, 0), (1, 3), (3, 1)})
        states = {}
        for mesh in found:
            mesh.find_ended(lambda rank: states.get(rank, RUNS))
        yield found, states


@pytest.fixture
def files(tmp_path):
    return certificates(tmp_path)
