"""Where the server of a session is: how to reach it, and the errors of its loss and its silence."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ringcomm.bootstrap.place import UNIX, Place, is_between_hosts
from ringcomm.bootstrap.start_errors import FIREWALL, rank_in_job
from ringcomm.bootstrap.wire import unix
from ringcomm.bootstrap.wire.framing import MessageSocket, is_unreachable
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.errors import CollectiveTimeout, PeerLost

__all__ = ["Endpoint", "find_endpoint"]

IN_START = " during startup"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach the server of a session, and the errors of its loss and its silence.

    Attributes:
        name: of the server, for these errors
        connect: takes the seconds for it
        secret: what a member sends; None: the connection has proved it
        rank: of the server in the job; None: it is a launcher
        suffix: of the errors
        always_up: it has listened since the job began: where nothing does, it has ended
        address: at which other hosts reach it, or another server of the job; "" if there is none
        longest_pause: seconds between two attempts to connect, which grow; short beside the start of an interpreter
    """

    name: str
    connect: Callable[[float], MessageSocket]
    secret: str | None = None
    rank: int | None = None
    suffix: str = ""
    always_up: bool = False
    address: str = ""
    longest_pause: float = 0.05

    def lost(self, how: str) -> PeerLost:
        return PeerLost(f"{self.name} {how}{self.suffix}", rank=self.rank)

    def silent(self, seconds: float, error: OSError | None = None) -> CollectiveTimeout:
        """`error`: that of the last attempt to connect."""
        why = f" ({error.strerror or error})" if error else ""
        hint = f"; {FIREWALL}" if self.address and error and is_unreachable(error) else ""
        text = f"{self.name} did not answer within {seconds:g} s{why}{self.suffix}{hint}"
        return CollectiveTimeout(text, rank=self.rank, got=None if self.rank is None else [self.rank])


def find_endpoint(place: Place, keepalive: float = KEEPALIVE) -> Endpoint:
    """Return the endpoint of the server of a job: the launcher, or rank 0 where another launcher has started it."""
    store = place.store
    if is_between_hosts(store) or place.rank_0:
        return _endpoint_of_hosts(place, keepalive)
    address = unix.public_address(store.removeprefix(UNIX)) if store else unix.user_address(place.job)
    rank = None if store else rank_in_job(place.members, 0)
    return Endpoint(
        name="the launcher" if store else f"rank {rank}",
        connect=lambda seconds: unix.connect(address, seconds, MessageSocket),
        secret=place.secret,
        rank=rank,
        suffix="" if store else IN_START,
    )


def _endpoint_of_hosts(place: Place, keepalive: float) -> Endpoint:
    from ringcomm.bootstrap.wire import tcp  # its handshake takes hashlib, and thereby OpenSSL
    from ringcomm.bootstrap.wire.tls import find_identity

    address, secret, tls = place.store or place.rank_0, os.fsencode(place.secret), find_identity(place.tls)
    return Endpoint(
        name=f"the launcher of node 0 ({address})" if place.store else f"rank 0 ({address})",
        connect=lambda seconds: tcp.connect(address, secret, seconds, keepalive, tls=tls),
        rank=None if place.store else 0,
        suffix="" if place.store else IN_START,
        address=address,
    )
