"""Connects ranks on several hosts: those of one host by shared memory, all of them by sockets or UCX."""

import logging
import os
import secrets
import socket
from dataclasses import asdict, replace
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any

from ringcomm.algorithms.link_cost import link_facts, selector
from ringcomm.bootstrap.facts import all_gather_facts
from ringcomm.bootstrap.place import Place, host_id, master_address
from ringcomm.bootstrap.store import Store
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.machine import topology
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.network.layout import layout_of
from ringcomm.transports.network.mesh import connect_mesh, local_address
from ringcomm.transports.network.transport import Network, NetworkTransport
from ringcomm.transports.network.ucx import connect_ucx

__all__ = ["NEEDS_STORE", "connect", "serves"]

log = logging.getLogger("ringcomm")

NEEDS_STORE = True
FACTS = "network"  # in the store
OWN = ("kernels", "log", "host_id", "host_address", "ucx")  # settings of each process; rank 0 decides all others


def serves(place: Place) -> bool:
    return place.hosts and (bool(place.store) or place.launcher == "a store")


def connect(rank: int, size: int, store: Store, config: Config) -> Transport:
    mine: dict[str, Any] = {
        "version": version("ringcomm"),
        "host": [host_id(), config.host_id],
        "cores": sorted(topology.cores()),
        "config": asdict(config),
        "link": link_facts(),
        "secret": secrets.token_hex(32),  # rank 0's is that of the job
    }
    ranks = all_gather_facts(store, FACTS, rank, size, mine, config.timeout)
    shm.check_versions([each["version"] for each in ranks])
    config = Config(**ranks[0]["config"] | {name: mine["config"][name] for name in OWN})
    layout = layout_of(rank, [tuple(each["host"]) for each in ranks])
    if config.oversubscribed is None:
        on_host = [each["cores"] for each in ranks if each["host"][0] == mine["host"][0]]
        config = replace(config, oversubscribed=layout.yields_early(on_host))
    local = shm.connect(layout.local_rank, len(layout.local_ranks), _HostStore(store, layout.host), config)
    if len(layout.ranks) == 1:
        return local
    log.info("%d ranks on %d hosts", size, len(layout.ranks))
    address = config.host_address or _own_address(store.server or master_address())
    machines = {each["host"][0] for each in ranks}  # one where `host_id` alone tells the hosts apart
    loopback = _loopback(address) if len(machines) > 1 else ""
    handle, name = connect_ucx(rank, size, store, config, "" if loopback else address), "ucx"
    if handle is None:
        if loopback:
            text = f"rank {rank}: the other hosts cannot reach this one at {loopback}, the address of {address!r}"
            raise ArgumentError(f"{text}: set RINGCOMM_HOST_ADDRESS to one that they reach", rank=rank)
        sockets = connect_mesh(rank, size, store, address, ranks[0]["secret"].encode(), config.timeout)
        handle, name = _open_sockets(rank, size, sockets, config), "network"
    network = Network(handle, selector(config, [each["link"] for each in ranks], name), name)
    return NetworkTransport(network, 1, list(range(size)), layout, local, NULL)


def _open_sockets(rank: int, size: int, sockets: list[int], config: Config) -> Any:
    slot = ffi.new("rc_network **")
    check(lib.rc_network_open(rank, size, sockets, config.keepalive, slot))
    return ffi.gc(slot[0], lib.rc_network_free)


def _own_address(server: str) -> str:
    """Return the address of the interface that leads to the store of the job, else the name of this host."""
    return local_address(server) if server else os.uname().nodename


def _loopback(host: str) -> str:
    """Return the address that the name stands for if only this host reaches it, else ""."""
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # who listens there will say so
        return ""
    return found if ip_address(found.partition("%")[0]).is_loopback else ""


class _HostStore:
    """The part of a store that the ranks of one host use among themselves."""

    def __init__(self, store: Store, host: int) -> None:
        self._store, self._host, self.server = store, host, store.server

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"host {self._host}/{key}", value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._store.get(f"host {self._host}/{key}", timeout)

    def abort(self, error: RingcommError) -> None:
        self._store.abort(error)

    def check(self) -> None:
        self._store.check()
