"""Groups of ranks that share memory already, because the default group does: they need not be connected again.

torch calls the backend on these ranks alone, so `Communicator.split`, which all ranks call, cannot make them. Instead
one reserves memory and publishes where it lies, unless another one has; no rank waits for another. The first
call waits, as any call does, and names a rank that does not join.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ringcomm.communicator import Communicator
from ringcomm.torch.shared import communicator_of

__all__ = ["connect_ranks_of_world", "remember"]

Store = Any  # of torch


class _Start:
    """The start of a communicator: its store, which no other start uses, and how many groups of a name it has made."""

    def __init__(self, store: Store) -> None:
        self.store, self.made = store, Counter[str]()


_starts: WeakKeyDictionary[Communicator, _Start] = WeakKeyDictionary()


def remember(comm: Communicator, store: Store) -> None:
    """Remember through which store a communicator was connected, for groups of its ranks."""
    _starts[comm] = _Start(store)


def connect_ranks_of_world(name: str, ranks: Sequence[int], timeout: float) -> Communicator | None:
    """Return the communicator of these ranks of the world; None if they do not share its memory."""
    world = communicator_of(None)
    start = _starts.get(world) if world else None
    local = world._transport.as_local if world else None
    if world is None or start is None or local is None:
        return None
    number = start.made[name] + 1  # torch takes the name of a group again once that is destroyed
    key = f"memory of {name}, {number}"
    try:
        # Where the key is new, compare_set stores its last argument. It returns what is stored then.
        offset = start.store.compare_set(key, "", "")
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # a store of the program that lacks compare_set
        return None
    if not offset:
        offset = start.store.compare_set(key, "", str(local.reserve_group(len(ranks))))
    comm = Communicator(local.open_group(int(offset), ranks, timeout), place=world._place)
    start.made[name] = number
    return comm
