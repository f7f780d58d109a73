"""TLS between hosts: the same results and errors as without, nothing readable on the wire, and who is refused."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_restarts_nodes import run as run_elastic

import harness
from cases.between_hosts import check_exact, run_on
from cases.collectives import PLANS
from cases.meshes import LOCAL, REACH, serve_until
from harness.failures import raised, until
from harness.nodes import SECRET, Job, StartClient, finish
from ringcomm import ArgumentError, Config, RingcommError
from ringcomm.bootstrap.endpoint import find_endpoint
from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.wire.addresses import listen
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.tcp import TcpGate
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.mesh import Mesh
from ringcomm.transports.network.search import RUNS

CERTIFICATES = Path(__file__).parents[2] / "cases" / "tls"  # all valid for a century, but the one that has expired
MARK = b"nobody else may read this mark."


@pytest.fixture
def files(tmp_path):
    """Return the setting with this certificate, and that authority: `files(name, authority)`."""
    shutil.copytree(CERTIFICATES, tmp_path / "tls")
    for key in (tmp_path / "tls").glob("*.key"):
        key.chmod(0o600)

    def named(name="rank", authority="authority"):
        return ",".join(str(tmp_path / "tls" / each) for each in (f"{name}.pem", f"{name}.key", f"{authority}.pem"))

    return named


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
def sniffer():
    """Yield a function that returns what has passed the loopback interface."""
    try:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))  # of all protocols
    except PermissionError:
        pytest.skip("only root sees packets")
    with packets:
        packets.bind(("lo", 0))
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


@contextmanager
def store(identity):
    gate = TcpGate([listen(LOCAL, [0], "--master-addr")], [SECRET.encode()], KEEPALIVE, find_identity(identity))
    server = Server(gate, None)
    try:
        yield gate.addresses[0]
    finally:
        server.close()


def join(address, identity):
    place = Place(0, 1, "tls", SECRET, store=address, tls=identity)
    return StartClient(find_endpoint(place), place.job, place, 20)


@pytest.mark.parametrize("encrypted", [False, True])
def test_nobody_reads_the_store_of_a_job_with_tls(files, encrypted):
    identity = files() if encrypted else None
    with sniffer() as seen, store(identity) as address, join(address, identity) as client:
        for key, value in (("small", MARK), ("large", 100_000 * MARK)):
            client.set(key, json.dumps(value.decode()).encode())
            assert json.loads(client.find(key)) == value.decode()
        if not encrypted:
            until(lambda: MARK in seen(), "the mark")
    assert (MARK in seen()) != encrypted


# --- Who is refused ---------------------------------------------------------------------------------------------------


@contextmanager
def both_ends(files, server, client):
    """Yield the address of a store, and the settings of both ends: of none, of this certificate, or of one that trusts
    two authorities.
    """
    folder = Path(files().split(",")[0]).parent
    (folder / "both.pem").write_bytes((folder / "authority.pem").read_bytes() + (folder / "another.pem").read_bytes())
    settings = {
        None: None,
        "rank": files(),
        "stranger": files("stranger", "another"),
        "trusting": files("stranger", "both"),
    }
    with store(settings[server]) as address:
        yield address, settings[client]


@pytest.mark.parametrize(
    ("server", "client", "here", "there"),
    [
        (None, "rank", "RINGCOMM_TLS is set here, and not there", "RINGCOMM_TLS is set there, and not here"),
        ("rank", None, "RINGCOMM_TLS is set there, and not here", "it sent no valid TLS"),
        (
            *("rank", "stranger", "its certificate is refused: unable to get local issuer certificate"),
            "it refused the certificate of this process (tlsv1 alert unknown ca)",
        ),
        (
            *("rank", "trusting", "it refused the certificate of this process (tlsv1 alert unknown ca)"),
            "its certificate is refused: unable to get local issuer certificate",
        ),
    ],
)
def test_both_ends_say_why_they_do_not_connect(files, server, client, here, there, caplog):
    with both_ends(files, server, client) as (address, setting):
        error = raised(ArgumentError, lambda: join(address, setting))
        assert str(error) == f"cannot connect to the store at {address}: {here}"
        until(lambda: there in caplog.text, "the log")


@contextmanager
def two_meshes(*settings):
    with ExitStack() as opened:
        meshes = [
            opened.enter_context(closing(Mesh(layout_of(rank, "01"), (), reach, b"secret", KEEPALIVE)))
            for rank, reach in enumerate(replace(REACH, tls=find_identity(setting)) for setting in settings)
        ]
        for mesh in meshes:
            mesh.addresses = [each.own for each in meshes]
        yield meshes


@pytest.mark.parametrize("encrypts", [0, 1])
def test_a_start_ends_at_once_where_only_some_ranks_have_tls(files, encrypts):
    with two_meshes(*[files() if rank == encrypts else None for rank in range(2)]) as meshes:
        meshes[1].connect_to(0)
        words = re.escape(f"rank 1: cannot connect to rank 0 at {meshes[0].own[0]}: RINGCOMM_TLS is set")
        with pytest.raises(ArgumentError, match=words):
            serve_until(meshes, lambda: False, "the failure")


def test_a_later_connection_that_tls_refuses_is_a_lost_rank(files):
    with two_meshes(files(), files("stranger", "another")) as meshes:
        for mesh in meshes:
            mesh.find_ended(lambda _: RUNS)
        meshes[1].connect_to(0)
        serve_until(meshes, lambda: meshes[1].ended, "the failure")
        assert b"its certificate is refused: unable to get local issuer certificate" in meshes[1].ended[0]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("missing", "rank", "authority"), "cannot read '{0}': No such file or directory"),
        (("rank", "rank", ""), "cannot read '{2}': Is a directory"),
        (("rank", "stranger", "authority"), "cannot use the key {1}: key values mismatch"),
        (
            ("expired", "expired", "authority"),
            "the certificate {0} is not one of the authority {2}: certificate has expired",
        ),
        (
            ("stranger", "stranger", "authority"),
            "the certificate {0} is not one of the authority {2}: unable to get local issuer certificate",
        ),
        (
            ("another", "another", "authority"),
            "the certificate {0} is not one of the authority {2}: self-signed certificate",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(files, names, what):
    folder = Path(files().split(",")[0]).parent
    paths = [
        str(folder / f"{name}.{kind}" if name else folder)
        for name, kind in zip(names, ("pem", "key", "pem"), strict=True)
    ]
    error = raised(ArgumentError, lambda: find_identity(",".join(paths)))
    assert str(error) == f"tls (RINGCOMM_TLS): {what.format(*paths)}"


def test_a_key_that_others_can_read_is_refused(files):
    key = Path(files().split(",")[1])
    key.chmod(0o640)
    error = raised(ArgumentError, lambda: find_identity(files()))
    assert str(error).startswith(f"other users can read the key in {key} (owner {key.stat().st_uid}, mode 640)")


def test_a_setting_has_three_files(files):
    with pytest.raises(ArgumentError, match="tls: expected the files CERTIFICATE,KEY,AUTHORITY"):
        Config(tls=files().rpartition(",")[0])


def test_without_openssl_a_sentence_says_so(files, tmp_path):
    (tmp_path / "libssl.so.3").touch()
    program = f"from ringcomm.bootstrap.wire.tls import find_identity; find_identity({files()!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=harness.OPERATION,
    )
    assert ended.returncode == 1
    assert f"TLS needs OpenSSL 3 or 1.1.1: {tmp_path}/libssl.so.3: file too short" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_launcher_without_a_valid_certificate_ends_with_a_sentence(tmp_path, files, monkeypatch):
    monkeypatch.setenv("RINGCOMM_TLS", files("expired"))
    with closing(Job(tmp_path, 2)) as job:
        for node in range(2):
            status, lines, text = finish(job.start(node, 1, job.program("")))
            assert status == 2
            assert lines == []
            assert "certificate has expired" in text.splitlines()[-1]


@pytest.mark.slow
def test_nodes_with_and_without_tls_do_not_wait_for_each_other(tmp_path, files, monkeypatch):
    with closing(Job(tmp_path, 2)) as job:
        first = job.start(0, 1, job.program(""), "--start-timeout=5")
        monkeypatch.setenv("RINGCOMM_TLS", files())
        status, _, text = finish(job.start(1, 1, job.program("")))
        assert status == 2
        assert "RINGCOMM_TLS is set here, and not there" in text
        status, _, text = finish(first)
        assert status == 2
        assert "RINGCOMM_TLS is set there, and not here" in text


def test_ucx_does_not_carry_what_is_to_be_encrypted(files):
    with pytest.raises(RingcommError, match="with RINGCOMM_TLS the link is sockets, since UCX encrypts nothing"):
        run_on("01", exchange_large, tls=files(), link="ucx")
