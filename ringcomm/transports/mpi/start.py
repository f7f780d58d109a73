"""Connects ranks that MPI has started, after finding out which of them share memory."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringcomm.bootstrap.place import Place
from ringcomm.bootstrap.start_errors import format_ranks
from ringcomm.bootstrap.store import job_store
from ringcomm.config import Config
from ringcomm.errors import (
    ArgumentError,
    RingcommError,
    encode_error,
    failure_on,
    raise_first_failure,
)
from ringcomm.transports import shm
from ringcomm.transports.contract import Transport
from ringcomm.transports.mpi.finalize import abort_at_exit, leaving
from ringcomm.transports.mpi.link import MpiNetwork, mpi_table
from ringcomm.transports.mpi.world import all_gather_facts, duplicate, require_intracomm, serialized, world
from ringcomm.transports.network.facts import JobFacts, facts_of

__all__ = ["NEEDS_STORE", "aborting_on_interrupt", "connect", "join", "serves"]

NEEDS_STORE = False  # MPI connects its ranks


def serves(place: Place) -> bool:
    return place.mpi or place.launcher == "none"


def connect(rank: int, size: int, store: None, config: Config) -> Transport:  # noqa: ARG001 (a TransportModule)
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
        abort_at_exit(type(interrupt))
        raise


def join(comm: Any, config: Config) -> Transport:
    """Connect the ranks of an MPI communicator; it stays usable and unchanged."""
    require_intracomm(comm)
    for left in [*leaving]:
        left.free_if_unused()  # MPI has few communicators
    own = duplicate(comm, config.start_limit)
    rank = own.Get_rank()
    mine = {
        **facts_of(rank, config),
        "secret": secrets.token_hex(16),
        "serialized": serialized(),
        "tls": config.tls is not None,
    }
    ranks = all_gather_facts(own, mine, config.start_limit)
    job = JobFacts(rank, ranks, config)
    config, layout = job.config, job.layout
    several = len(layout.ranks) > 1
    if several and (unfit := [other for other, facts in enumerate(ranks) if not facts["serialized"]]):
        own.Free()
        text = "MPI runs at a thread level below MPI_THREAD_SERIALIZED: set MPI4PY_RC_THREAD_LEVEL=multiple"
        raise ArgumentError(f"{text} ({format_ranks(unfit)})", rank=unfit[0])
    if several and (encrypted := [other for other, facts in enumerate(ranks) if facts["tls"]]):
        own.Free()
        text = "tls (RINGCOMM_TLS): MPI connects these hosts, and ringcomm cannot encrypt what it carries"
        raise ArgumentError(f"{text} ({format_ranks(encrypted)})", rank=encrypted[0])
    local: shm.ShmTransport | None = None
    table = None
    failure: Exception | None = None
    try:
        secret = ranks[layout.local_ranks[0]]["secret"]
        here = layout.local_ranks
        place = Place(layout.local_rank, len(here), f"MPI/{secret}", secret, "MPI", members=here)
        with job_store(place, config.start_limit) as store:
            local = shm.connect(place.rank, place.size, store, config)
        table = mpi_table(own) if several else None
    except Exception as error:  # of any kind: the other ranks wait
        failure = error
    sent = encode_error(_named(failure, rank)) if failure else ""
    failures = [text for text in all_gather_facts(own, sent, 2 * config.start_limit) if text]
    if failures:
        if local:
            local.close()
        own.Free()
        raise_first_failure(failures, rank, failure)
    assert local is not None
    if not several:
        own.Free()
        return local
    return job.make_transport(MpiNetwork(own, table, job.selector("mpi"), config.timeout), local)


def _named(error: Exception, rank: int) -> RingcommError:
    """Return the error of this rank for the others: it names the rank that has failed, else this one."""
    return error if isinstance(error, RingcommError) and error.rank is not None else failure_on(rank, error)
