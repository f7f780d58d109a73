"""Connects ranks on several hosts: those of one host by shared memory, others by sockets or UCX."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace

from ringcomm.bootstrap.client import Meanwhile
from ringcomm.bootstrap.descriptor_exchange import REPORT_TIMEOUT
from ringcomm.bootstrap.place import Place, master_address
from ringcomm.bootstrap.start_errors import rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts
from ringcomm.bootstrap.wire.tcp import local_address, loopback, unreachable
from ringcomm.config import Config
from ringcomm.errors import RingcommError
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.network.facts import JobFacts, facts_of
from ringcomm.transports.network.mesh import connect_mesh
from ringcomm.transports.network.reconnect import Survivors
from ringcomm.transports.network.sockets import SocketNetwork
from ringcomm.transports.network.transport import Network
from ringcomm.transports.network.ucx import connect_ucx

__all__ = ["NEEDS_STORE", "connect", "serves"]

NEEDS_STORE = True
FACTS = "network"  # in the store


def serves(place: Place) -> bool:
    return place.hosts and (bool(place.store) or place.launcher == "a store")


def connect(rank: int, size: int, store: Store, config: Config) -> Transport:
    of_job = {} if rank else {"secret": secrets.token_hex(32), "name": secrets.token_hex(8)}  # of the connections
    ranks = all_gather_facts(store, FACTS, rank, size, {**facts_of(rank, config), **of_job}, config.start_limit)
    job = JobFacts(rank, ranks, config, store.members)
    config, layout = job.config, job.layout
    here = [rank_in_job(store.members, each) for each in layout.local_ranks]
    local = shm.connect(layout.local_rank, len(here), _HostStore(store, layout.host, here), config)
    if len(layout.ranks) == 1:
        return local
    # Where hosts have several ranks, those of another one may wait for one of theirs until their deadline, and name it.
    longer = REPORT_TIMEOUT if len(layout.ranks) < size else 0.0
    patient = replace(config, start_timeout=config.start_limit + longer)
    # That of the interface to the store, else the name of this host.
    server = store.server or master_address()
    address = config.host_address or (local_address(server) if server else os.uname().nodename)
    found = loopback(address) if job.machines > 1 else ""
    handle = connect_ucx(rank, size, store, patient, "" if found else address)
    name = "sockets" if handle is None else "ucx"
    # The survivors use the same link.
    survivors = Survivors(store.place, replace(config, link=name), connect) if store.place else None
    if handle is not None:
        return job.make_transport(Network(handle, job.selector(name), name, survivors), local)
    if found:
        raise unreachable(rank_in_job(store.members, rank), address, found)
    secret = ranks[0]["secret"].encode()
    mesh = connect_mesh(rank, size, layout.neighbors(), store, address, secret, patient.start_limit)
    network = SocketNetwork(rank, size, mesh, ranks[0]["name"], config, job.selector(name), survivors)
    return job.make_transport(network, local)


class _HostStore:
    """The part of a store that the ranks of one host use among themselves."""

    def __init__(self, store: Store, host: int, members: Sequence[int]) -> None:
        self._store, self._host, self.members = store, host, members
        self.server, self.place = store.server, store.place

    def gather(
        self, name: str, rank: int, size: int, fact: bytes, timeout: float, meanwhile: Meanwhile = None
    ) -> bytes | list[int]:
        return self._store.gather(f"host {self._host}/{name}", rank, size, fact, timeout, meanwhile)

    def abort(self, error: RingcommError) -> None:
        self._store.abort(error)

    def check(self) -> None:
        self._store.check()
