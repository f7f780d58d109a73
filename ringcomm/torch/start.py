"""Connects the ranks of a torch.distributed group through torch's store."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ringcomm.bootstrap.torch_start import start_through, store_lost
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.start import connect as connect_ranks
from ringcomm.torch.compat.torchrun import let_the_cause_end_first
from ringcomm.torch.groups import connect_ranks_of_world, remember

__all__ = ["connect", "connected"]

_prepared: list[Communicator] = []  # for the default group that is made next


def connect(options: Any) -> Communicator:
    """Connect the ranks of a group, given torch's DistributedBackendOptions."""
    let_the_cause_end_first()
    config, ranks = Config(timeout=options.timeout.total_seconds()), list(options.global_ranks_in_group)
    if ranks:  # else it is the default group
        try:
            comm = connect_ranks_of_world(options.group_id, ranks, config.timeout)
        except dist.DistNetworkError as error:
            raise store_lost(error) from None
        if comm is not None:
            return comm
    elif _prepared:
        remember(_prepared[0], options.store)
        return _prepared[0]
    rank, size = options.group_rank, options.group_size
    with start_through(options.store, rank, size, config) as start:
        comm = connect_ranks(rank, size, start.store, config, hosts=start.hosts)
    remember(comm, start.torch_store)
    return comm


@contextmanager
def connected(comm: Communicator) -> Iterator[None]:
    """Use this communicator for a default group that is made in the body."""
    _prepared.append(comm)
    try:
        yield
    finally:
        _prepared.clear()
