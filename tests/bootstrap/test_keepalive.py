"""The settings by which TCP finds out that a host is gone."""

import socket

from ringcomm.bootstrap.wire.keepalive import PROBE_AGAIN, probe, probe_now
from ringcomm.config import MAX_KEEPALIVE


def test_the_kernel_takes_the_settings_for_every_limit():
    with socket.socket() as some:
        for keepalive in (0.001, *range(1, 400), 1000, 86400, MAX_KEEPALIVE):
            probe(some, keepalive)
            idle, interval, probes = (
                some.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert keepalive <= idle + probes * interval < keepalive + 3 + interval


def test_a_peer_that_answers_is_asked_seldom():
    """Whoever waits for it sleeps meanwhile: it wakes up for this alone."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        probe(connected, 15)
        assert [probe_now(connected) for _ in range(3)] == [PROBE_AGAIN] * 3
        assert PROBE_AGAIN == 1
