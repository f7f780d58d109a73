"""Groups of some ranks of another group.

dist.new_group calls the backend on these ranks alone, so `Communicator.split`, which all ranks call, cannot make them.
Where the default group shares memory, one of them reserves memory and publishes where it lies, unless another one has;
no rank waits for another. The first call waits, as any call does, and names a rank that does not join.

dist.split_group is called by all ranks of the other group.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ringcomm import Communicator, MismatchError, RingcommError
from ringcomm.errors import refuse
from ringcomm.torch.compat import native
from ringcomm.torch.shared import communicator_of

__all__ = ["Splitting", "connect_ranks_of_world", "remember"]

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls

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


class Splitting:
    """What a process group does in dist.split_group."""

    comm: Communicator
    # Of the group.
    _name: str
    _ranks: list[int]
    _store: Any
    annotated: Any

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002 (of NCCL)
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002 (the group serves all)
    ) -> Any:
        """Make a group of some of these ranks, all of which call this; the others name ranks they are not among."""
        name = f"{self._name}:{'_'.join(map(str, new_ranks))}" if group_name is None else group_name
        group = self._part(sorted(new_ranks), c10d.PrefixStore(f"{name}/", self._store), name)
        if group is not None:
            if timeout is not None:
                group.set_timeout(timeout)
            group.setGroupDesc(group_desc or "undefined")
            native.register(group)
        return group

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> Any:
        """Do the same from torch 2.14 on, for a new group around it."""
        group = self._part(ranks, store, opts.group_name)
        if group is None:  # where None would end the process
            raise refuse("the ranks of split_group", "this one among them, from torch 2.14 on", list(ranks))
        group.set_timeout(opts._timeout)
        return group

    def _part(self, ranks: Sequence[int], store: Store, name: str) -> Any:
        """Return the group of these ranks, in this order; None on the others."""
        ranks = list(ranks)
        is_member = self.comm.rank in ranks
        try:
            self._compare_parts(ranks if is_member else [])
            color, key = (min(ranks), ranks.index(self.comm.rank)) if is_member else (None, 0)
            comm = self.comm.split(color, key)
        except RingcommError as error:
            raise self.annotated(error)  # noqa: B904 (it is the same error)
        if comm is None:
            return None
        options = c10d._DistributedBackendOptions()
        options.store, options.group_id = store, name
        options.group_rank, options.group_size = comm.rank, comm.size
        options.global_ranks_in_group = [self._ranks[rank] if self._ranks else rank for rank in ranks]
        options.timeout = timedelta(seconds=comm._transport.timeout)
        made: Any = type(self)
        return made(comm, options)

    def _compare_parts(self, ranks: list[int]) -> None:
        """Raise MismatchError on all ranks unless each of `ranks`, the part of this one, is in the same part."""
        part = hashlib.sha256(repr(ranks).encode()).hexdigest()
        parts = [tuple(fact) for fact in self.comm._router.all_gather_facts("split", [part, len(ranks)])]
        named = Counter(parts)
        for rank, (part, size) in enumerate(parts):
            if size and (found := named[part, size]) != size:
                text = f"the ranks split their group differently: rank {rank} names {size} ranks, {found} name the same"
                raise MismatchError(text, rank=rank, collective="split")
