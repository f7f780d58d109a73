"""Addresses of this host and of others, `host:port` or `[host]:port`, and sockets that listen at one."""

import errno
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from ringcomm.bootstrap.wire.peers import WAITING
from ringcomm.bootstrap.wire.tls import TlsIdentity, find_identity
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, refuse
from ringcomm.machine.ports import holders

__all__ = [
    "Reach",
    "is_unspecified",
    "join_address",
    "listen",
    "listen_at",
    "local_address",
    "loopback",
    "name_of",
    "reach_of",
    "scoped_as",
    "split_address",
    "unreachable",
]


PAUSES = (0.0, 0.02, 0.1, 0.3)  # seconds, at most, before each look for a free port of a range


@dataclass(frozen=True, slots=True)
class Reach:
    """Where this process listens for other hosts, and by what they know it.

    Attributes:
        hosts: The addresses at which they reach this host.
        bound: Those of its interfaces at which it listens: one for each of `hosts`, or one for all.
        ports: The ones that it may take; None: any.
        setting: What sets `bound`, for an error.
        tls: What this process shows them; None: there is no TLS.
    """

    hosts: Sequence[str]
    bound: Sequence[str]
    ports: range | None = None
    setting: str = "RINGCOMM_HOST_ADDRESS"
    tls: TlsIdentity | None = None

    @property
    def mapped(self) -> bool:
        """Whether others reach this host at addresses apart from those at which it listens."""
        return [*self.bound] != [*self.hosts]

    @property
    def sources(self) -> list[str]:
        """Return for each address the one of this host from which it connects; "": the one that leads there."""
        return ["" if is_unspecified(host) else host for host in self.bound]

    def addresses(self, bound: Sequence[str]) -> list[str]:
        """Return the addresses at which others reach this process, given those at which it listens."""
        if not self.mapped:
            return [*bound]
        ports = [split_address(each)[1] for each in bound]
        return [join_address(host, ports[i % len(ports)]) for i, host in enumerate(self.hosts)]


def reach_of(config: Config, find: Callable[[], str]) -> Reach:
    """Return where this process listens: as set, else at the address of this host that `find` returns."""
    bound = config.bind_addresses
    hosts = config.host_addresses or [each for each in bound if not is_unspecified(each)] or [find()]
    tls = find_identity(config.tls)
    if not bound:
        return Reach(hosts, hosts, config.ports, tls=tls)
    return Reach(hosts, bound, config.ports, "RINGCOMM_BIND_ADDRESS", tls)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def name_of(listener: socket.socket) -> str:
    """Return the address at which a socket listens."""
    return join_address(_own_host(listener), listener.getsockname()[1])


def local_address(server: str) -> str:
    """Return the address from which this host reaches that server, `host:port`. Nothing is sent."""
    host, port = split_address(server)
    family, _, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as probing:
        probing.connect(resolved)
        return _own_host(probing)


def _own_host(bound: socket.socket) -> str:
    host, _, *rest = bound.getsockname()
    interface = rest[1] if rest else 0  # of a link-local address, which Python leaves out
    return f"{host}%{socket.if_indextoname(interface)}" if interface else str(host)


def scoped_as(address: str, own: Callable[[], str]) -> str:
    """Return the address of another host with the interface of this one that the address `own()` names.

    Only a link-local address names one, as in [fe80::1%eth0]:29500: that host has named its own.
    """
    if "%" not in address or not (interface := own().partition("%")[2]):
        return address
    host, port = split_address(address)
    return join_address(f"{host.partition('%')[0]}%{interface}", port)


def is_unspecified(host: str) -> bool:
    """Return whether this is an address that stands for all of a host: 0.0.0.0 or ::."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:  # a name
        return False
    return bool((getattr(found, "ipv4_mapped", None) or found).is_unspecified)


def loopback(host: str) -> str:
    """Return the address that the name stands for if only this host reaches it, else ""."""
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # who listens there will say so
        return ""
    return found if ip_address(found.partition("%")[0]).is_loopback else ""


def unreachable(rank: int, address: str, found: str) -> ArgumentError:
    """Return the error of a rank whose address no other host reaches; `found`: the one that it stands for, or ""."""
    at = f"{found}, the address of {address!r}" if found else repr(address)
    text = f"rank {rank}: the other hosts cannot reach this one at {at}"
    return ArgumentError(f"{text}: set RINGCOMM_HOST_ADDRESS to one that they reach", rank=rank)


def listen(
    host: str, ports: Sequence[int], purpose: str, *, any_address: bool = False, needed: int = 0
) -> socket.socket:
    """Return a non-blocking socket that listens at this address, at the first of the ports that is free.

    `any_address`: the address may stand for all of this host. `needed`: how many ports the ranks of this host take
    of these, which the error names if none is free; 0: unknown.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        text = f"{purpose}: cannot find the address of {host!r}: {getattr(error, 'strerror', error)}"
        raise ArgumentError(text) from None
    if is_unspecified(str(resolved[0])) and not any_address:
        raise refuse(purpose, "one address of this machine, not all", repr(host))
    # A range is not full at the first look: some hold a port for a moment only, as a rank that looks for one for UCX.
    in_range = isinstance(ports, range)
    for pause in PAUSES if in_range else PAUSES[:1]:
        time.sleep(random.uniform(0.0, pause))
        for port in ports:
            try:
                return _listening(family, (resolved[0], port, *resolved[2:]))
            except OSError as error:
                if not in_range or error.errno != errno.EADDRINUSE:
                    raise _cannot_listen(purpose, join_address(host, port), error) from None
    each = f"the {needed} ranks of this host need one each" if needed > 1 else "each rank of a host needs one"
    text = f"{purpose}: no port of RINGCOMM_PORT_RANGE={ports[0]}-{ports[-1]} is free at {host}: {each}"
    raise ArgumentError(f"{text}; in use: {holders(ports) or 'all'}")


def _listening(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a job that has just ended
        listener.bind(address)
        listener.listen(WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def listen_at(reach: Reach, purpose: str) -> list[socket.socket]:
    """Return sockets that listen at any port of each address."""
    with ExitStack() as failed:
        listeners = [failed.enter_context(listen(host, [0], purpose, any_address=reach.mapped)) for host in reach.bound]
        failed.pop_all()
    return listeners


def _cannot_listen(purpose: str, address: str, error: OSError) -> ArgumentError:
    hint = ""
    if error.errno == errno.EADDRNOTAVAIL:
        hint = ": no interface has it (RINGCOMM_BIND_ADDRESS is where to listen if others reach this host elsewhere)"
    elif error.errno == errno.EINVAL and address.startswith("[fe80:"):
        hint = ": a link-local address names its interface, as in fe80::1%eth0"
    return ArgumentError(f"{purpose}: cannot listen at {address}: {error.strerror}{hint}")
