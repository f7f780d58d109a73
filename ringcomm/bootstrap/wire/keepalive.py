"""How TCP finds out that a host is gone, and not just cut off for a while."""

import math
import socket
from functools import cache
from typing import NamedTuple

__all__ = ["KEEPALIVE", "PROBE_AGAIN", "Patience", "patience_with", "probe", "probe_now"]

KEEPALIVE = 15.0  # seconds after which a host that does not answer is lost; `run --help` documents it
PROBE_AGAIN, PROBE_SILENT_AGAIN = 1.0, 0.25  # seconds between two calls of `probe_now`
MOST_PROBES = 100  # within `keepalive`: TCP counts up to 127
LATE, SLACK = 0.65, 0.25  # seconds; the kernel's timers are late by up to a sixteenth
# Since Linux 6.15. TCP sends data again 15 times by default, at pauses of up to so many seconds, before it gives up.
TCP_RTO_MAX_MS, LEAST_PAUSE, LONGEST_PAUSE = 44, 1.0, 120.0
TCPI_PROBES = 3  # in struct tcp_info: probes that were not answered


class Patience(NamedTuple):
    """For how many seconds a host may be silent, since its last answer, that is cut off for less than `keepalive`."""

    idle: float  # with nothing on its way there
    resending: float


def patience_with(keepalive: float) -> Patience:
    """Return how long to wait for a host that `probe` asks.

    So that an outage of 0.9 of `keepalive` ends in time, its last answer before may be one interval old, and the first
    one after come one interval late. Data is sent again ten times; kernels before 6.15 double the pause each time, and
    are then silent for up to as long as the outage was.
    """
    idle = _idle_timeout(keepalive)
    return Patience(idle, idle if _limits_pauses() else 2 * idle)


def probe(connected: socket.socket, keepalive: float) -> None:
    """Have TCP ask the other host again and again, whether it has data for it or not.

    TCP asks once a second, which is as often as it can, or 100 times within `keepalive`.
    """
    interval = _interval(keepalive)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(_idle_timeout(keepalive) / interval) - 1),
    ):
        connected.setsockopt(level, option, value)
    if _limits_pauses():
        pause = min(max(keepalive / 10, LEAST_PAUSE), LONGEST_PAUSE)
        connected.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, int(1000 * pause))


def probe_now(connected: socket.socket) -> float:
    """Have TCP ask a host that has been silent for an interval at once, and notice one that was for too long.

    Returns in how many seconds to call this again. Whoever does so while it waits loses a host sooner than an interval
    after its patience has ended.
    """
    unanswered = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_PROBES + 1)[TCPI_PROBES]
    idle = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)  # starts its timer anew
    return PROBE_SILENT_AGAIN if unanswered else PROBE_AGAIN


def _interval(keepalive: float) -> int:
    return math.ceil(max(1, keepalive / MOST_PROBES))


def _idle_timeout(keepalive: float) -> float:
    return max(keepalive + LATE, 0.9 * keepalive + 2 * _interval(keepalive) + SLACK)


@cache
def _limits_pauses() -> bool:
    """Return whether the kernel can limit the pauses after which data is sent again."""
    with socket.socket() as some:
        try:
            some.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, int(1000 * LONGEST_PAUSE))
        except OSError:
            return False
    return True
