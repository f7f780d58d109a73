"""Communicators that their members make alone, without the other ranks of any other communicator."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from threading import Thread

from ringcomm.bootstrap.place import Place, find_place
from ringcomm.bootstrap.store import HashStore, job_store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.mpi4py.groups.context import Context
from ringcomm.start import connect
from ringcomm.transports.messages import ANY_SOURCE, ANY_TAG

__all__ = ["connect_alone", "connect_members", "settings"]

PERIOD = 0.1  # seconds between two looks for ranks that have died

_calls: Counter[str] = Counter()


def settings(timeout: float) -> Config:
    """Return the settings of a communicator whose calls may take `timeout` seconds, its start the usual time."""
    usual = Config()
    return replace(usual, timeout=timeout, start_timeout=usual.start_limit)


def connect_alone(config: Config) -> Communicator:
    """Return the communicator of this process alone."""
    return connect(0, 1, HashStore(), config)


def connect_members(ranks: Sequence[int], rank: int, tag: str, parent: Context) -> Communicator:
    """Connect as `rank` with the other members, which are `ranks` of the world; all are in the parent, too.

    The members find each other by the name of the job, their ranks and the tag; each counts its calls, so that a second
    call does not join the first.

    Raises:
        CollectiveTimeout: Some members did not come.
        PeerLost: A rank of the parent died.
    """
    config = settings(parent.comm.timeout)
    if len(ranks) == 1:
        return connect_alone(config)
    world = replace(find_place(), tls=config.tls)
    name = f"{world.job}/{tag}/{','.join(map(str, ranks))}"
    _calls[name] += 1
    place = replace(world, rank=rank, size=len(ranks), job=f"{name}#{_calls[name]}", members=tuple(ranks))
    return _while_alive(parent, partial(_connect, place, config))


def _connect(place: Place, config: Config) -> Communicator:
    with job_store(place, config.start_limit) as store:
        return connect(place.rank, place.size, store, config, place.hosts)


def _while_alive(parent: Context, start: Callable[[], Communicator]) -> Communicator:
    """Return what `start` does, unless a rank of the parent dies: only the parent notices that before it has joined."""
    started: Future[Communicator] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)

    Thread(target=run, name="ringcomm group", daemon=True).start()
    while not wait([started], PERIOD).done:
        parent.messages.iprobe(ANY_SOURCE, ANY_TAG)  # raises PeerLost
    return started.result()
