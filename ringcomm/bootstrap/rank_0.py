"""The store of a start on several hosts that rank 0 serves over TCP, where the launcher serves none.

Each start has a server of its own, all at one address, one after another.
"""

import os
from contextlib import suppress
from dataclasses import replace

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.server import Server
from ringcomm.bootstrap.session import Start
from ringcomm.bootstrap.wire.addresses import listen, local_address, loopback, split_address
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.bootstrap.wire.tcp import TcpGate
from ringcomm.bootstrap.wire.tls import find_identity
from ringcomm.errors import ArgumentError

__all__ = ["find_rank_0", "serve_hosts"]

_last: Server | None = None


def find_rank_0(place: Place) -> Place:
    """Return the place with an address of rank 0 that other hosts reach too.

    The name of a host often stands for a loopback address there: then its interface to the last host counts.
    """
    host, port = split_address(place.rank_0)
    if not (found := loopback(host)):
        return place
    here = found
    with suppress(OSError):  # no such name
        here = local_address(f"{place.last_host}:{port}") if place.last_host else found
    if loopback(here):
        text = f"the other hosts cannot reach rank 0 at {found}, the address of {host!r}"
        raise ArgumentError(f"{text}: set MASTER_ADDR to one that they reach")
    return replace(place, rank_0=f"{here}:{port}")


def serve_hosts(place: Place, timeout: float) -> Server:
    """Serve a start in this process, rank 0, once the server of the start before has ended."""
    global _last
    earlier = {}
    if _last:
        _last.join(timeout)
        earlier = _last.failed
    purpose = f"rank 0 of job {place.job!r}"
    host, port = split_address(place.rank_0)
    tls = find_identity(place.tls)
    gate = TcpGate([listen(host, [port], purpose)], [os.fsencode(place.secret)], KEEPALIVE, tls)
    _last = Server(gate, 0, main=(place.job, Start(place.size, place.members)), earlier=earlier)
    return _last
