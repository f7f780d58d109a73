"""The settings by which TCP finds out that a host is gone."""

import socket

from ringcomm.bootstrap.wire.keepalive import probe
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
