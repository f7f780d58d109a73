"""Collectives of arrays that move data. It moves as bytes: types need to agree in size only, as in MPI."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.base.constants import IN_PLACE
from ringcomm.mpi4py.buffers.specification import divided, vector, w_vector, whole
from ringcomm.mpi4py.calls.forms import CheckedCollective

__all__ = [
    "allgather",
    "allgatherv",
    "alltoall",
    "alltoallv",
    "alltoallw",
    "as_bytes",
    "barrier",
    "bcast",
    "exchange",
    "gather",
    "gatherv",
    "in_place",
    "scatter",
    "scatterv",
    "split",
]

Array = NDArray[Any]
Parse = Callable[[Any, int], Any]  # of a specification, for so many blocks


def barrier(context: Any) -> CheckedCollective:
    """Wait until all ranks have called this."""
    return CheckedCollective(lambda at_once: context.comm.barrier(async_op=at_once))


def bcast(context: Any, buf: Any, root: int = 0) -> CheckedCollective:
    """Copy the array of `root` to all ranks."""
    buffer = whole(buf)
    if context.rank == context.check_root(root):
        return CheckedCollective(
            lambda at_once: context.comm.broadcast(as_bytes(buffer.data()), root, async_op=at_once)
        )
    return CheckedCollective(
        lambda at_once: context.comm.broadcast(as_bytes(buffer.target()), root, async_op=at_once),
        lambda _: buffer.store(),
    )


def gather(context: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CheckedCollective:
    """Collect blocks of equal size on `root`, in rank order."""
    return _gather(context, sendbuf, recvbuf, root, divided)


def gatherv(context: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CheckedCollective:
    """Collect blocks of any size on `root`."""
    return _gather(context, sendbuf, recvbuf, root, vector)


def _gather(context: Any, sendbuf: Any, recvbuf: Any, root: int, parse: Parse) -> CheckedCollective:
    blocks = parse(recvbuf, context.size) if context.rank == context.check_root(root) else None
    own = _own_block(context, sendbuf, blocks)

    def start(at_once: bool) -> Any:
        target = None if blocks is None else as_bytes(blocks.target())
        mine = own(target)
        if parse is divided:
            return context.comm.gather(mine, target, root, async_op=at_once)
        if blocks is None:
            return exchange(context, [(root, mine)], None, [], at_once)
        return exchange(context, [(root, mine.copy() if in_place(sendbuf) else mine)], target, blocks.lengths, at_once)

    return CheckedCollective(start, None if blocks is None else lambda _: blocks.store())


def scatter(context: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CheckedCollective:
    """Divide the array of `root` into blocks of equal size, one for each rank."""
    return _scatter(context, sendbuf, recvbuf, root, divided)


def scatterv(context: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> CheckedCollective:
    """Divide the array of `root` into blocks of any size, one for each rank."""
    return _scatter(context, sendbuf, recvbuf, root, vector)


def _scatter(context: Any, sendbuf: Any, recvbuf: Any, root: int, parse: Parse) -> CheckedCollective:
    block = None if context.rank == context.check_root(root) and in_place(recvbuf) else whole(recvbuf)
    blocks = parse(sendbuf, context.size) if context.rank == root else None

    def start(at_once: bool) -> Any:
        source: Any = None if blocks is None else as_bytes(blocks.data()[0])
        target = _own_part(context, source, blocks) if block is None else as_bytes(block.target())
        if parse is divided:
            return context.comm.scatter(source, target, root, async_op=at_once)
        sends = list(enumerate(split(source, blocks.lengths))) if blocks else []
        lengths = [0] * context.size
        lengths[root] = target.size
        return exchange(context, sends, np.empty_like(target) if block is None else target, lengths, at_once)

    return CheckedCollective(start, None if block is None else lambda _: block.store())


def allgather(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Collect blocks of equal size on all ranks, in rank order."""
    return _all_gather(context, sendbuf, recvbuf, divided)


def allgatherv(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Collect blocks of any size on all ranks."""
    return _all_gather(context, sendbuf, recvbuf, vector)


def _all_gather(context: Any, sendbuf: Any, recvbuf: Any, parse: Parse) -> CheckedCollective:
    blocks = parse(recvbuf, context.size)
    own, lengths = _own_block(context, sendbuf, blocks), None if parse is divided else blocks.lengths

    def start(at_once: bool) -> Any:
        target = as_bytes(blocks.target())
        return context.comm.all_gather(own(target), target, lengths, async_op=at_once)

    return CheckedCollective(start, lambda _: blocks.store())


def alltoall(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send block j to rank j, and receive block i from rank i; all are of one size."""
    return _all_to_all(context, sendbuf, recvbuf, divided)


def alltoallv(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send block j to rank j, and receive block i from rank i, of any sizes."""
    return _all_to_all(context, sendbuf, recvbuf, vector)


def alltoallw(context: Any, sendbuf: Any, recvbuf: Any) -> CheckedCollective:
    """Send block j to rank j, and receive block i from rank i, of any sizes and types."""
    return _all_to_all(context, sendbuf, recvbuf, w_vector)


def _all_to_all(context: Any, sendbuf: Any, recvbuf: Any, parse: Parse) -> CheckedCollective:
    received = parse(recvbuf, context.size)
    sent = received if in_place(sendbuf) else parse(sendbuf, context.size)

    def start(at_once: bool) -> Any:
        source = as_bytes(sent.data()[0])
        if sent is received:
            source = source.copy()
        target = as_bytes(received.target())
        if parse is divided:
            return context.comm.all_to_all(source, target, async_op=at_once)
        return context.comm.all_to_all(source, target, sent.lengths, received.lengths, async_op=at_once)

    return CheckedCollective(start, lambda _: received.store())


def exchange(context: Any, sends: list[tuple[int, Array]], target: Any, lengths: list[int], at_once: bool) -> Any:
    """Send arrays to some ranks, in rank order, while receiving `lengths` bytes from each rank.

    An all_to_all needs to know only what this rank sends and receives, unlike a gather or scatter with counts.
    """
    counts = [0] * context.size
    for peer, data in sends:
        counts[peer] += data.size
    source = sends[0][1] if len(sends) == 1 else np.concatenate([data for _, data in sends] or [np.empty(0, np.uint8)])
    target = np.empty(0, np.uint8) if target is None else target
    return context.comm.all_to_all(source, target, counts, lengths or [0] * context.size, async_op=at_once)


def _own_block(context: Any, sendbuf: Any, blocks: Any) -> Callable[[Any], Array]:
    """Return what takes the target of a gather, `blocks`, and returns the bytes that this rank contributes."""
    if blocks is None or not in_place(sendbuf):
        block = whole(sendbuf)
        return lambda _: as_bytes(block.data())

    def own_block(target: Array) -> Array:
        own, mine = _own_part(context, target, blocks), _own_part(context, as_bytes(blocks.data()[0]), blocks)
        if not np.may_share_memory(own, mine):
            own[:] = mine
        return own

    return own_block


def _own_part(context: Any, data: Any, blocks: Any) -> Array:
    """Return this rank's block of the bytes of all blocks."""
    start = sum(blocks.lengths[: context.rank])
    own: Array = data[start : start + blocks.lengths[context.rank]]
    return own


def split(data: Array, lengths: Sequence[int]) -> list[Array]:
    return np.split(data, np.cumsum(lengths)[:-1])


def in_place(spec: Any) -> bool:
    """Return whether a specification says that the other buffer has the data, too."""
    return spec is None or spec is IN_PLACE


def as_bytes(data: Array) -> Array:
    """Return a view of the bytes of a contiguous array."""
    return data.view(np.uint8)
