"""Communicators that their members make alone, without the other ranks of any other communicator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ringcomm.bootstrap.place import find_place
from ringcomm.bootstrap.store import HashStore, job_store
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.start import connect

__all__ = ["connect_members"]

_calls: Counter[str] = Counter()


def connect_members(ranks: Sequence[int], rank: int, tag: str, timeout: float) -> Communicator:
    """Connect as `rank` with the other members, which are `ranks` of the world.

    The members find each other by the name of the job, their ranks and the tag; each counts its calls, so that a second
    call does not join the first.
    """
    config = Config(timeout=timeout)
    if len(ranks) == 1:
        return connect(0, 1, HashStore(), config)
    world = find_place()
    name = f"{world.job}/{tag}/{','.join(map(str, ranks))}"
    _calls[name] += 1
    place = replace(world, rank=rank, size=len(ranks), job=f"{name}#{_calls[name]}")
    with job_store(place, timeout) as store:
        return connect(rank, len(ranks), store, config, world.hosts)
