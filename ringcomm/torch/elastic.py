"""Continue after the loss of ranks: the default group of torch.distributed without them, and with those that come back.

Start the program with `ringcomm run --respawn N`. `shrink` and `grow` destroy all groups: what is on them, as a
DistributedDataParallel, a mesh or a grid, must be made anew.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

import ringcomm
from ringcomm.bootstrap.place import find_place
from ringcomm.bootstrap.wire.addresses import Reach, listen, local_address, reach_of
from ringcomm.communicator import Communicator
from ringcomm.config import Config
from ringcomm.errors import Aborted, ArgumentError, CollectiveTimeout, PeerLost, RingcommError
from ringcomm.torch import start
from ringcomm.torch.shared import communicator_of

__all__ = ["Stateful", "grow", "init_process_group", "load_latest", "shrink"]

c10d: Any = dist.distributed_c10d
TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009 (torch's stubs leave it out)
STORE_TIMEOUT = timedelta(seconds=10)  # of a connection


class Stateful(Protocol):
    """A module, an optimizer, or anything else with states."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def init_process_group(timeout: float | None = None) -> None:
    """Start torch.distributed on the ranks of `ringcomm run`. In a restarted rank this waits for `grow`.

    Raises: see `ringcomm.init`.
    """
    _make_default(ringcomm.init(timeout))


def shrink(timeout: float | None = None) -> None:
    """Make a default group of the ranks that are left; all call this. See `Communicator.shrink`.

    Ranks that wait in a call of any group get Aborted, so that they come too.
    """
    default = _default()
    for group in c10d._world.pg_map:
        comm = communicator_of(group)
        if comm and comm is not default:
            with suppress(RingcommError):  # it is closed
                comm.abort(Aborted(f"rank {comm.rank} has called shrink", rank=comm.rank))
    _make_default(default.shrink(timeout=timeout), timeout)


def grow(timeout: float | None = None) -> bool:
    """Take restarted ranks into the default group; return whether any has come.

    All ranks call this, new ones `init_process_group`. See `Communicator.grow`. If none has come, the groups stay.
    """
    before = _default()
    grown = before.grow(timeout=timeout)
    if grown is before:
        return False
    _make_default(grown, timeout)
    return True


def load_latest(step: int, objects: Sequence[Stateful]) -> int:
    """Give all ranks the states of one that has done most steps; return how many it has done. Collective.

    After `shrink`, ranks that were stopped in a step get the result of those that have finished it, so that no step is
    lost or done twice; after `grow`, a new rank gets what it missed. Without any difference nothing is sent but the
    steps.

    Args:
        step: how many steps this rank has done
        objects: modules, optimizers and others, the same on every rank
    """
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    latest = max(steps)
    if min(steps) < latest:
        source = steps.index(latest)
        states = _broadcast([each.state_dict() for each in objects], source)
        if step < latest:
            for each, state in zip(objects, states, strict=True):
                each.load_state_dict(state)
    return latest


def _broadcast(tree: Any, source: int) -> Any:
    """Return the tree of one rank on every rank: its tensors travel as such, all else pickled."""
    message = [
        tree_map_only(torch.Tensor, lambda x: _Like(x.shape, x.dtype, x.device.type), tree),
        [getattr(each, "_metadata", None) for each in tree],  # the versions of modules
    ]
    dist.broadcast_object_list(message, source)
    if dist.get_rank() != source:
        tree = tree_map_only(
            _Like, lambda like: torch.empty(like.shape, dtype=like.dtype, device=like.device), message[0]
        )
        for each, metadata in zip(tree, message[1], strict=True):
            if metadata is not None:
                each._metadata = metadata
    for x in tree_leaves(tree):
        if isinstance(x, torch.Tensor):
            dist.broadcast(x.detach().contiguous(), source)
    return tree


@dataclass(frozen=True)
class _Like:
    """What a tensor must be like to receive another."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _default() -> Communicator:
    comm = communicator_of(None) if dist.is_initialized() else None
    if comm is None:
        raise ArgumentError("expected a default group on the backend ringcomm: call ringcomm.torch.init_process_group")
    return comm


def _make_default(comm: Communicator, timeout: float | None = None) -> None:
    """Make the default group of torch.distributed on a communicator, in place of the one that there is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while True:
        try:
            store = _tcp_store(comm)
            comm.barrier()  # rank 0 could end, and its store, before the others connect: a broadcast does not wait
            with start.connected(comm):
                dist.init_process_group("ringcomm", store=store, rank=comm.rank, world_size=comm.size)
            return
        except (PeerLost, CollectiveTimeout, Aborted, dist.DistError):  # more ranks are lost
            if dist.is_initialized():
                dist.destroy_process_group()
            comm = comm.shrink(timeout=timeout)


def _tcp_store(comm: Communicator) -> Any:
    if comm.rank > 0:
        host, port = comm.broadcast_object()
        return TCPStore(host, port, timeout=STORE_TIMEOUT)
    place = find_place()
    local = Reach(["127.0.0.1"], ["127.0.0.1"])
    reach = reach_of(Config(), lambda: local_address(place.store)) if place.hosts else local
    # torch itself would listen on all interfaces
    listener = listen(reach.bound[0], reach.ports or [0], "the store of torch", any_address=reach.mapped)
    listener.setblocking(True)
    host, port = reach.hosts[0], listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = TCPStore(host, port, timeout=STORE_TIMEOUT, **options)
    comm.broadcast_object((host, port))
    return store
