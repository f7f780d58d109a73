"""Neighborhood collectives: each rank communicates with its neighbors in a topology.

They are an all_to_all in which ranks that are no neighbors exchange nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import objects
from ringcomm.mpi4py.base.constants import PROC_NULL
from ringcomm.mpi4py.base.errors import handled
from ringcomm.mpi4py.base.pickling import pickle
from ringcomm.mpi4py.buffers.specification import divided, vector, w_vector, whole
from ringcomm.mpi4py.calls.forms import CheckedCollective, forms
from ringcomm.mpi4py.calls.moves import Parse, as_bytes, exchange, split
from ringcomm.mpi4py.groups.context import Context
from ringcomm.mpi4py.groups.topology import Cart

__all__ = ["Neighbors"]

Array = NDArray[Any]


def neighbor_allgather(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send an array to all neighbors, and receive one of equal size from each."""
    return _checked(context, _same(context, sendbuf), divided(recvbuf, len(_edges(context)[0])))


def neighbor_allgatherv(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send an array to all neighbors, and receive one of any size from each."""
    return _checked(context, _same(context, sendbuf), vector(recvbuf, len(_edges(context)[0])))


def neighbor_alltoall(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send a block to each neighbor, and receive one from each; all are of one size."""
    return _each(context, sendbuf, recvbuf, divided)


def neighbor_alltoallv(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send a block to each neighbor, and receive one from each, of any sizes."""
    return _each(context, sendbuf, recvbuf, vector)


def neighbor_alltoallw(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send a block to each neighbor, and receive one from each, of any sizes and types."""
    return _each(context, sendbuf, recvbuf, w_vector)


def _same(context: Any, sendbuf: Any) -> Callable[[], list[Array]]:
    block, count = whole(sendbuf), len(_edges(context)[1])
    return lambda: [as_bytes(block.data())] * count


def _each(context: Any, sendbuf: Any, recvbuf: Any, parse: Parse) -> CheckedCollective:
    sources, targets = _edges(context)
    sent = parse(sendbuf, len(targets))
    return _checked(context, lambda: split(as_bytes(sent.data()[0]), sent.lengths), parse(recvbuf, len(sources)))


def _checked(context: Any, blocks: Callable[[], list[Array]], received: Any) -> CheckedCollective:
    sources, targets = _edges(context)
    lengths = received.lengths
    arriving, slots = _by_peer(context, sources, lengths)

    def start(at_once: bool) -> Any:
        found = blocks()
        sends = [(targets[i], found[i]) for i in _sending_order(context, targets)]
        return exchange(context, sends, np.empty(sum(arriving), np.uint8), arriving, at_once)

    def finish(result: Array) -> None:
        target, before = as_bytes(received.target()), as_bytes(received.data()[0])
        if not np.may_share_memory(target, before):
            target[:] = before  # what no neighbor sends stays as it is
        starts = np.cumsum([0, *lengths])
        for slot, at in slots.items():
            target[starts[slot] : starts[slot + 1]] = result[at : at + lengths[slot]]
        received.store()

    return CheckedCollective(start, finish)


def _by_peer(context: Any, sources: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the bytes that arrive from each rank, and for each inedge where its bytes start."""
    arriving, slots, at = [0] * context.size, {}, 0
    for i in sorted((i for i, source in enumerate(sources) if source != PROC_NULL), key=lambda i: (sources[i], i)):
        slots[i] = at
        at += lengths[i]
        arriving[sources[i]] += lengths[i]
    return arriving, slots


def _sending_order(context: Any, targets: Sequence[int]) -> list[int]:
    """Return the outedges in the order in which their blocks are sent: by rank, then as the inedges there are numbered.

    In a grid a block to the rank before this one arrives from the rank after the other one: where both are one rank
    (periodic, of one or two ranks) the order is reversed.
    """
    flipped = isinstance(context.topology, Cart)
    edges = (i for i, target in enumerate(targets) if target != PROC_NULL)
    return sorted(edges, key=lambda i: (targets[i], i ^ flipped))


def _edges(context: Any) -> tuple[list[int], list[int]]:
    edges: tuple[list[int], list[int]] = context.topology.edges_of(context.rank)
    return edges


class Neighbors:
    """The neighborhood collectives of a communicator with a topology."""

    _object: Context

    Neighbor_allgather, Ineighbor_allgather, Neighbor_allgather_init = forms(neighbor_allgather)
    Neighbor_allgatherv, Ineighbor_allgatherv, Neighbor_allgatherv_init = forms(neighbor_allgatherv)
    Neighbor_alltoall, Ineighbor_alltoall, Neighbor_alltoall_init = forms(neighbor_alltoall)
    Neighbor_alltoallv, Ineighbor_alltoallv, Neighbor_alltoallv_init = forms(neighbor_alltoallv)
    Neighbor_alltoallw, Ineighbor_alltoallw, Neighbor_alltoallw_init = forms(neighbor_alltoallw)

    @handled
    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to all neighbors; return theirs."""
        return self.neighbor_alltoall([sendobj] * len(_edges(self._object)[1]))

    @handled
    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbor; return theirs for this rank. From PROC_NULL comes None."""
        context = self._object
        sources, targets = _edges(context)
        objs = list(sendobj)
        if len(objs) != len(targets):
            raise ValueError(f"expected {len(targets)} items, got {len(objs)}")
        outgoing: list[list[Any]] = [[] for _ in range(context.size)]
        for i in _sending_order(context, targets):
            outgoing[targets[i]].append(objs[i])
        incoming = [iter(each) for each in objects.all_to_all(context.comm, outgoing, codec=pickle.codec)]
        return [None if source == PROC_NULL else next(incoming[source]) for source in sources]
