"""Connects ranks on several hosts: those of one host by shared memory, others by sockets or UCX.

The first rank of each host speaks for it, and reads what all ranks tell; the others get that from it through shared
memory. So what the store sends grows with ranks times hosts, and not with the square of the ranks.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ringcomm.bootstrap.descriptor_exchange import REPORT_TIMEOUT
from ringcomm.bootstrap.place import Place, master_address
from ringcomm.bootstrap.session import ALL, FIRST
from ringcomm.bootstrap.start_errors import rank_in_job
from ringcomm.bootstrap.store import Store, all_gather_facts, ranks_of_host
from ringcomm.bootstrap.wire.addresses import Reach, local_address, loopback, reach_of, unreachable
from ringcomm.config import Config
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.network.facts import Facts, JobFacts, facts_by_rank, facts_of
from ringcomm.transports.network.host_stores import HostStore, SharingStore
from ringcomm.transports.network.sockets import SocketNetwork, connect_mesh
from ringcomm.transports.network.survivors import Survivors
from ringcomm.transports.network.transport import Network
from ringcomm.transports.network.ucx import connect_ucx
from ringcomm.transports.shm import ShmTransport

__all__ = ["NEEDS_STORE", "connect", "serves"]

NEEDS_STORE = True
FACTS = "network"  # in the store


def serves(place: Place) -> bool:
    return place.hosts and (bool(place.store or place.rank_0) or place.launcher == "a store")


def connect(rank: int, size: int, store: Store, config: Config) -> Transport:
    here = ranks_of_host(store, rank, size, config.host_id, config.start_limit)
    reach = _reach(store, config) if len(here) < size else Reach((), ())
    mine = _facts_of_host(rank, here, reach.bound, config)
    facts = all_gather_facts(store, FACTS, rank, size, mine, config.start_limit, reads=ALL if mine else FIRST)
    if mine:
        config = JobFacts(rank, facts_by_rank(facts), config, store.members).config
    local = shm.connect(here.index(rank), len(here), HostStore(store, here), config)
    if len(here) == size:
        return local
    with ExitStack() as failed:
        failed.callback(local.close)  # others of this host may wait for this rank there
        transport = _connect_hosts(rank, size, SharingStore(store, size, local, here), config, reach, local, facts)
        failed.pop_all()
    return transport


def _connect_hosts(
    rank: int,
    size: int,
    store: SharingStore,
    config: Config,
    reach: Reach,
    local: ShmTransport,
    facts: Sequence[Facts],
) -> Transport:
    """Connect the ranks of all hosts, whose first ranks have told these facts; those of this host are connected."""
    ranks = facts_by_rank(store.share(facts, config.start_limit))
    job = JobFacts(rank, ranks, config, store.members)
    config, layout = job.config, job.layout
    # Where hosts have several ranks, those of another one may wait for one of theirs until their deadline, and name it.
    longer = REPORT_TIMEOUT if len(layout.ranks) < size else 0.0
    patient = replace(config, start_timeout=config.start_limit + longer)
    address = next((each for each in reach.hosts if loopback(each)), reach.hosts[0])
    found = loopback(address) if job.machines > 1 else ""
    handle = connect_ucx(rank, size, store, patient, "" if found else reach.bound[0])
    name = "sockets" if handle is None else "ucx"
    # The survivors use the same link.
    survivors = Survivors(store.place, replace(config, link=name), connect) if store.place else None
    if handle is not None:
        return job.make_transport(Network(handle, job.selector(name), name, survivors), local)
    if found:
        raise unreachable(rank_in_job(store.members, rank), address, found)
    secret = ranks[0]["secret"].encode()
    mesh = connect_mesh(layout, store, reach, secret, config.keepalive, patient.start_limit)
    network = SocketNetwork(mesh, ranks[0]["name"], config.keepalive, job.flows, job.selector(name), survivors)
    return job.make_transport(network, local)


def _reach(store: Store, config: Config) -> Reach:
    """Return where this rank listens: as set, else at the address of the interface to the store, else of the host."""
    server = store.server or master_address()
    return reach_of(config, lambda: local_address(server) if server else os.uname().nodename)


def _facts_of_host(rank: int, here: Sequence[int], addresses: Sequence[str], config: Config) -> Facts | None:
    """Return what the first rank of a host tells all; the other ranks leave that to it."""
    if rank != here[0]:
        return None
    of_job = {} if rank else {"secret": secrets.token_hex(32), "name": secrets.token_hex(8)}  # of the connections
    return {"ranks": here, **facts_of(rank, config, addresses), **of_job}
