"""The address at which the ranks of other hosts reach this one."""

import os
import socket
from ipaddress import ip_address

from ringcomm.bootstrap.place import master_address
from ringcomm.bootstrap.store import Store
from ringcomm.bootstrap.wire.tcp import split_address
from ringcomm.config import Config

__all__ = ["local_address", "loopback", "own_address"]


def own_address(config: Config, store: Store) -> str:
    """Return the address that is set, else that of the interface to the store, else the name of this host."""
    server = store.server or master_address()
    return config.host_address or (local_address(server) if server else os.uname().nodename)


def local_address(server: str) -> str:
    """Return the address from which this host reaches that server, `host:port`. Nothing is sent."""
    host, port = split_address(server)
    family, _, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as probe:
        probe.connect(resolved)
        return str(probe.getsockname()[0])


def loopback(host: str) -> str:
    """Return the address that the name stands for if only this host reaches it, else ""."""
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # who listens there will say so
        return ""
    return found if ip_address(found.partition("%")[0]).is_loopback else ""
