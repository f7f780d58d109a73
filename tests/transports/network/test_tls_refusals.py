"""TLS between hosts: who is refused, by both ends, and which files."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from test_tls import exchange_large, join

import harness
from cases.between_hosts import run_on
from cases.meshes import REACH, serve_until
from harness.failures import raised, until
from harness.nodes import Job, finish, store_server
from ringcomm import ArgumentError, Config, RingcommError
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.transports.network.host_layout import layout_of
from ringcomm.transports.network.mesh import Mesh
from ringcomm.transports.network.search import RUNS


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
    with store_server(tls=find_identity(settings[server])) as address:
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
