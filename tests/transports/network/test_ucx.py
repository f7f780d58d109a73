"""The link over UCX: which libucp, when it is taken, and how its ranks are lost."""

import os
import re
import socket
from contextlib import closing

import pytest
import test_peer_lost as deaths

import harness
from cases.between_hosts import connect_on, run_on
from harness.failures import PROMPT, outcomes, raised
from harness.hosts import ADDRESSES, two_hosts, why_no_hosts
from harness.nodes import Job, finish
from ringcomm import ArgumentError, Config, RingcommError
from ringcomm.commands import doctor
from ringcomm.transports.network import ucx

needs_namespaces = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

OVER_UCX = {"RINGCOMM_LINK": "ucx"}


def test_the_libucp_of_the_extra_is_found():
    found = ucx.open_ucx(Config(), "127.0.0.1")
    assert "tcp/lo" in found.transports
    assert not {"posix/memory", "sysv/memory"} & {*found.transports}  # ranks that share memory have no link
    assert os.path.basename(found.library) == "libucp.so.0"
    assert doctor.ucx().startswith(f"{found.version} ({found.library}): ")


def test_a_libucp_that_cannot_be_opened_is_named_with_the_cure(monkeypatch, tmp_path):
    (tmp_path / "libucp.so").write_bytes(b"no library")
    for library, reason in (
        ("libnone.so", "cannot open shared object file"),
        (tmp_path / "libucp.so", "file too short"),
    ):
        monkeypatch.setenv("RINGCOMM_UCX", str(library))
        error = raised(RingcommError, doctor.ucx)
        assert str(error).startswith(f"cannot open UCX: {library}: {reason}")
        assert "pip install 'ringcomm[ucx]', or name a libucp with RINGCOMM_UCX" in str(error)


def test_a_library_that_is_not_libucp_is_refused():
    error = raised(RingcommError, lambda: ucx.open_ucx(Config(ucx="libc.so.6")))
    assert "there is no ucp_get_version_string: UCX 1.10 or later is needed" in str(error)


def test_a_libucp_that_can_use_nothing_of_this_host_names_the_variables_of_ucx(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "nothing")
    error = raised(RingcommError, lambda: ucx.open_ucx(Config()))
    assert re.fullmatch("cannot open UCX: ucp_init_version: .*: check UCX_TLS and UCX_NET_DEVICES", str(error))


def test_sockets_are_taken_without_rdma_and_ucx_where_it_is_asked_for():
    names = {}
    for link in (None, "sockets", "ucx"):
        names[link] = run_on("01", lambda comm: comm._router.name, link=link)
    assert names == {None: ["sockets"] * 2, "sockets": ["sockets"] * 2, "ucx": ["ucx"] * 2}


def test_rdma_is_taken_where_all_ranks_have_it(monkeypatch):
    monkeypatch.setattr(ucx, "has_rdma_devices", lambda: True)
    monkeypatch.setattr(ucx.Ucx, "has_rdma", True)
    assert run_on("01", lambda comm: comm._router.name) == ["ucx"] * 2


def test_ucx_is_not_opened_on_hosts_without_rdma_devices(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(ucx, "open_ucx", lambda *_: opened.append(1))
    for devices in ([], ["mlx5_0"]):
        monkeypatch.setattr(ucx, "DEVICES", tmp_path)
        for name in devices:
            (tmp_path / name).touch()
        assert run_on("01", lambda comm: comm._transport.name) == ["sockets"] * 2
        assert len(opened) == 2 * len(devices)


@pytest.fixture
def port():
    """One that nobody gets who asks for any."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_ucx_takes_a_port_of_the_range_where_all_addresses_are_bound(port):
    found = ucx.open_ucx(Config(port_range=f"{port}-{port + 20}"), "0.0.0.0")
    assert any(each.startswith("tcp/") for each in found.transports)


def test_a_range_that_is_full_refuses_no_rdma(port, monkeypatch):
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ArgumentError, match="UCX: no port of RINGCOMM_PORT_RANGE"):
            ucx.open_ucx(Config(port_range=str(port)), "127.0.0.1")
        monkeypatch.setattr(ucx, "has_rdma_devices", lambda: True)
        monkeypatch.setattr(ucx.Ucx, "has_rdma", True)
        assert ucx.open_ucx(Config(port_range=str(port)), "127.0.0.1").transports


def test_the_ports_of_the_variable_of_ucx_come_first(port, monkeypatch):
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "0")
    with socket.create_server(("127.0.0.1", port)):
        assert ucx.open_ucx(Config(port_range=str(port)), "127.0.0.1").transports


def test_why_ucx_is_dropped_on_hosts_with_rdma_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(ucx, "has_rdma_devices", lambda: True)
    assert run_on("01", lambda comm: comm._router.name, ucx="libnone.so") == ["sockets"] * 2
    (line,) = [each for each in caplog.messages if "UCX" in each]
    assert line.startswith("sockets take the place of UCX: rank 0: cannot open UCX: libnone.so: cannot open shared")


def test_a_rank_without_ucx_is_named(monkeypatch):
    def open_on_rank_0(config, address, opened=ucx.open_ucx):
        if config.host_id == "0":
            return opened(config, address)
        raise RingcommError("cannot open UCX: it is not there")

    monkeypatch.setattr(ucx, "open_ucx", open_on_rank_0)
    error = raised(ArgumentError, lambda: connect_on("01", link="ucx"))
    assert str(error) == "link='ucx' needs UCX on all ranks; rank 1: cannot open UCX: it is not there"
    assert error.rank == 1


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "victim", "name"), [("01", 1, "all_reduce"), ("0011", 3, "all_to_all")])
def test_a_killed_rank_is_named_by_every_survivor(layout, victim, name):
    with harness.world(layout, "nodes", OVER_UCX.items()) as pool:
        pid = pool.processes[victim].pid
        found = {
            rank: (answer, when)
            for rank, answer, when in outcomes(pool, deaths.call_until_one_dies, name, 1 << 20, victim, 0.1)
        }
    _, death = found.pop(victim)
    for (lost, text), end in found.values():
        assert lost == victim, text
        assert f"rank {victim} (process {pid}) died" in text or f"rank {victim} was lost" in text
        assert end - death < PROMPT


ARRAY = 8 << 20  # bytes
SUM = f"""
import numpy as np, ringcomm
with ringcomm.init() as comm:
    x = np.arange({ARRAY} // 8)
    comm.all_reduce(x)
    assert (x == 4 * np.arange(x.size)).all()
    print("done", comm.rank)
"""


@pytest.mark.slow
@needs_namespaces
def test_hosts_exchange_data_over_tcp(tmp_path, monkeypatch):
    for name, value in OVER_UCX.items():
        monkeypatch.setenv(name, value)
    with two_hosts() as hosts, closing(Job(tmp_path, 2)) as job:
        program, address = job.program(SUM), (ADDRESSES[0], 29500)
        before = hosts.a.bytes_sent()
        launchers = [job.start(node, 2, program, enter=host.enter, address=address) for node, host in enumerate(hosts)]
        done = [line for launcher in launchers for line in finish(launcher)[1]]
        sent = hosts.a.bytes_sent() - before
    assert sorted(done) == [f"[{rank}] done {rank}" for rank in range(4)]
    assert ARRAY < sent < 1.1 * ARRAY + (1 << 20)
