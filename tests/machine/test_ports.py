"""Which process holds a TCP port."""

import os
import socket
from pathlib import Path

import pytest

from ringcomm.machine.ports import SHOWN, holders


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_process_that_holds_a_port_is_named(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        held = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error.strerror}")
    with held:
        port = held.getsockname()[1]
        name = Path("/proc/self/comm").read_text().strip()
        assert holders([port]) == f"{port} by process {os.getpid()} ({name})"
    assert holders([port]) == ""


def test_a_port_that_only_a_closed_connection_holds_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as peer:
            server.accept()[0].close()  # first, so that this end waits
            peer.recv(1)
    assert holders([port]) == str(port)


def test_of_many_ports_the_first_are_named():
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(SHOWN + 2)]
    ports = sorted(each.getsockname()[1] for each in servers)
    said = holders(ports)
    assert all(f"{port} by" in said for port in ports[:SHOWN])
    assert said.endswith(") and 2 more")
    for each in servers:
        each.close()


def test_without_proc_nothing_is_known(tmp_path):
    assert holders(range(1, 100), tmp_path) == ""
