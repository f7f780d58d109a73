"""dist.split_group: groups of the ranks of another one, which all of its ranks make together."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcomm import Communicator, MismatchError, RingcommError
from ringcomm.torch.compat import native

__all__ = ["Splitting"]

c10d: Any = dist.distributed_c10d  # torch's stubs leave out much of what it calls


class Splitting:
    """What makes parts of a process group."""

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
        is_member = self.comm.rank in new_ranks
        try:
            self._compare_parts(new_ranks if is_member else [])
            comm = self.comm.split(min(new_ranks) if is_member else None, key=self.comm.rank)
        except RingcommError as error:
            raise self.annotated(error)  # noqa: B904 (it is the same error)
        if comm is None:
            return None
        options = c10d._DistributedBackendOptions()
        options.store, options.group_id = c10d.PrefixStore(f"{name}/", self._store), name
        options.group_rank, options.group_size = comm.rank, comm.size
        options.global_ranks_in_group = [self._ranks[rank] if self._ranks else rank for rank in sorted(new_ranks)]
        options.timeout = timedelta(seconds=comm._transport.timeout)
        made: Any = type(self)
        group = made(comm, options)
        if timeout is not None:
            group.set_timeout(timeout)
        group.setGroupDesc(group_desc or "undefined")
        native.register(group)
        return group

    def _compare_parts(self, ranks: Sequence[int]) -> None:
        """Raise MismatchError on all ranks unless each of `ranks`, the part of this one, is in the same part."""
        part = hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()
        parts = [tuple(fact) for fact in self.comm._transport.all_gather_facts("split", [part, len(ranks)])]
        named = Counter(parts)
        for rank, (part, size) in enumerate(parts):
            if size and (found := named[part, size]) != size:
                text = f"the ranks split their group differently: rank {rank} names {size} ranks, {found} name the same"
                raise MismatchError(text, rank=rank, collective="split")
