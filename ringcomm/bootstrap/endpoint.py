"""Where the server of a job's sessions is reached, and what its loss is called."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ringcomm.bootstrap.arrivals import arrival_timeout, rank_in_job
from ringcomm.bootstrap.place import UNIX, Place
from ringcomm.bootstrap.wire import tcp, unix
from ringcomm.bootstrap.wire.framing import ENDED
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["Endpoint", "find_endpoint", "launcher_endpoint"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach the server of a session, and the errors of its loss and its silence.

    `lost` takes how the connection has ended, `unreachable` the seconds in which no server was found and the reason,
    `silent` the seconds in which none has answered.
    """

    name: str
    connect: Callable[[float], socket.socket]
    lost: Callable[[str], PeerLost]
    unreachable: Callable[[float, str], CollectiveTimeout]
    silent: Callable[[float], CollectiveTimeout]
    nonce: str | None = None  # that a member tells; None: the connection has proved it
    always_up: bool = False  # it has listened since the job began: where nothing does, it has ended


def find_endpoint(place: Place, keepalive: float = KEEPALIVE) -> Endpoint:
    """Return the endpoint of the server of a job: its launcher, or rank 0."""
    if place.store:
        return launcher_endpoint(place, keepalive)
    first = rank_in_job(place.members, 0)
    address = unix.user_address(place.job)
    return Endpoint(
        name=f"rank {first}",
        connect=lambda seconds: unix.connect(address, seconds),
        lost=lambda how: PeerLost(f"rank {first} {'exited during startup' if how == ENDED else how}", rank=first),
        unreachable=lambda seconds, _: arrival_timeout([0], place.size, seconds, members=place.members),
        silent=lambda seconds: CollectiveTimeout(f"rank {first} did not answer within {seconds:g} s", rank=first),
        nonce=place.nonce,
    )


def launcher_endpoint(place: Place, keepalive: float = KEEPALIVE) -> Endpoint:
    """Return the endpoint of the launcher that serves the sessions of a job."""
    store, secret = place.store, os.fsencode(place.nonce)
    if store.startswith(UNIX):
        name, address, nonce = "the launcher", unix.user_address(store.removeprefix(UNIX)), place.nonce
    else:
        name, address, nonce = "the launcher of node 0", "", None
    return Endpoint(
        name=name,
        connect=lambda it: unix.connect(address, it) if address else tcp.connect(store, secret, it, keepalive),
        lost=lambda how: PeerLost(f"{name}, which serves the store at {store}, {how}"),
        unreachable=lambda it, why: CollectiveTimeout(f"found no store at {store} within {it:g} s: {why}"),
        silent=lambda it: CollectiveTimeout(f"{name} did not answer within {it:g} s"),
        nonce=nonce,
    )
