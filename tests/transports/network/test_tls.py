"""TLS between hosts: the same results as without, and nothing readable on the wire."""

import json
import socket
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from test_restarts_nodes import run as run_elastic

import harness
import ringcomm
from cases.between_hosts import check_exact, run_on
from cases.collectives import PLANS
from cases.meshes import LOCAL, free_port
from harness.failures import until
from harness.hosts import why_no_hosts
from harness.nodes import SECRET, Job, StartClient, store_server
from ringcomm import ArgumentError
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.wire.addresses import Reach
from ringcomm.bootstrap.wire.peers import PeerServer
from ringcomm.bootstrap.wire.shared_port import open_gate
from ringcomm.bootstrap.wire.tls import find_identity

MARK = b"nobody else may read this mark."


# --- The same results and errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["01", "0011", "012"])
def test_results_are_the_same_over_tls(files, layout):
    run_on(layout, check_exact, [*PLANS], 4096, tls=files())


def exchange_large(comm):
    length = (1 << 20) + 1
    for _ in range(3):
        x = np.arange(length, dtype=np.int64) * (comm.rank + 1)
        comm.all_reduce(x)
        assert (x == np.arange(length) * (comm.size * (comm.size + 1) // 2)).all()
    work = comm.send(x, (comm.rank + 1) % comm.size, async_op=True)
    found = np.empty_like(x)
    comm.recv(found, (comm.rank - 1) % comm.size)
    work.wait()
    assert (found == x).all()


@pytest.mark.parametrize("flows", [1, 3])
def test_large_data_arrives_over_tls(files, flows):
    run_on("0011", exchange_large, tls=files(), flows=flows)


@pytest.mark.parametrize("flows", [1, 3])
def test_ranks_that_share_a_port_are_told_apart_inside_tls(files, flows):
    """The ranks are threads of one process, which has one port for all."""
    with free_port() as port:
        run_on("0011", exchange_large, tls=files(), flows=flows, host_address=LOCAL, port_range=str(port))


def test_servers_with_and_without_tls_do_not_share_a_port(files):
    with free_port() as port:
        plain = Reach([LOCAL], [LOCAL], range(port, port + 1))
        server = PeerServer(open_gate(plain, "rank 0", b"secret", None, 0), print, 0)
        with closing(server), pytest.raises(ArgumentError, match=f"no port of RINGCOMM_PORT_RANGE={port}"):
            open_gate(replace(plain, tls=find_identity(files())), "rank 0", b"another", None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("respawn", [1, 0])
def test_survivors_shrink_and_lost_ranks_come_back_over_tls(tmp_path, files, monkeypatch, respawn):
    monkeypatch.setenv("RINGCOMM_TLS", files())
    with closing(Job(tmp_path, 2)) as job:
        found, statuses, text = run_elastic(job, [[2, 0, 10]], respawn, wait=10.0 if respawn else 0.2)
    assert statuses == [0, 0], text
    assert [rest[2] for rest in found.values()] == [3 + respawn] * (3 + respawn)


# --- Nothing readable -------------------------------------------------------------------------------------------------


@contextmanager
def sniffer(interface="lo"):
    """Yield a function that returns what has passed the interface."""
    try:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))  # of all protocols
    except PermissionError:
        pytest.skip("only root sees packets")
    with packets:
        packets.bind((interface, 0))
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        packets.settimeout(0.1)
        seen, over = bytearray(), threading.Event()

        def listen():
            while not over.is_set():
                with suppress(TimeoutError):
                    seen.extend(packets.recv(1 << 17))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield lambda: bytes(seen)
        finally:
            over.set()
            thread.join()


def tell(comm, elements):
    """Send the mark, first in a packet and then in a long message."""
    for repeats in (1, elements):
        x = np.frombuffer(MARK * repeats, np.uint8).copy()
        comm.broadcast(x if comm.rank == 0 else np.zeros_like(x))


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("flows", [1, 2])
def test_nobody_reads_the_data_of_a_job_with_tls(files, encrypted, flows):
    with sniffer() as seen:
        run_on("01", tell, 50_000, flows=flows, **({"tls": files()} if encrypted else {}))
        if not encrypted:
            until(lambda: MARK in seen(), "the mark")
    assert (MARK in seen()) != encrypted


def join(address, identity):
    place = Place(0, 1, "tls", SECRET, store=address, tls=identity)
    return StartClient(find_endpoint(place), place.job, place, 20)


@pytest.mark.parametrize("encrypted", [False, True])
def test_nobody_reads_the_store_of_a_job_with_tls(files, encrypted):
    identity = files() if encrypted else None
    with sniffer() as seen, store_server(tls=find_identity(identity)) as address, join(address, identity) as client:
        for key, value in (("small", MARK), ("large", 100_000 * MARK)):
            client.set(key, json.dumps(value.decode()).encode())
            assert json.loads(client.find(key)) == value.decode()
        if not encrypted:
            until(lambda: MARK in seen(), "the mark")
    assert (MARK in seen()) != encrypted


def tell_under_torchrun(_, encrypted):
    """Return whether the mark has been seen on the link."""
    with sniffer("eth0") as seen:
        for _ in range(2):
            with ringcomm.init(timeout=harness.OPERATION) as comm:
                tell(comm, 50_000)
        if not encrypted:
            until(lambda: MARK in seen(), "the mark")
    return MARK in seen()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_nobody_reads_the_data_of_torchrun_with_tls(files, monkeypatch, encrypted):
    """Each rank has one port, for the start that rank 0 serves, too."""
    pytest.importorskip("torch")
    if reason := why_no_hosts():
        pytest.skip(reason)
    monkeypatch.setenv("RINGCOMM_PORT_RANGE", "29501-29502")
    if encrypted:
        monkeypatch.setenv("RINGCOMM_TLS", files())
    with harness.world("0011", "torchrun") as pool:
        assert pool.run(tell_under_torchrun, (encrypted,)) == [not encrypted] * 4
