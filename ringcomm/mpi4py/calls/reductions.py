"""Reductions of arrays: by ringcomm where it has the operation for the dtype; else gathered, and folded by NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.mpi4py.buffers.specification import Buffer, divided, whole
from ringcomm.mpi4py.calls.forms import CheckedCollective
from ringcomm.mpi4py.calls.moves import as_bytes, in_place
from ringcomm.mpi4py.ops.op import Op
from ringcomm.mpi4py.ops.predefined import SUM

__all__ = ["allreduce", "exscan", "reduce", "reduce_scatter", "reduce_scatter_block", "scan"]

Array = NDArray[Any]


def reduce(context: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> CheckedCollective:
    """Reduce the arrays of all ranks on `root`."""
    is_root = context.rank == context.check_root(root)
    sent, received = _reduced(sendbuf, recvbuf) if is_root else (whole(sendbuf), None)
    name = _native(op, sent)

    def start(at_once: bool) -> Any:
        data = sent.data()
        if name is None:
            return context.comm.gather(as_bytes(data), None, root, async_op=at_once)
        return context.comm.reduce(data, name, root, _target(received, sent, data), async_op=at_once)

    return CheckedCollective(start, _finish(context, op, name, received, sent))


def allreduce(context: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CheckedCollective:
    """Reduce the arrays of all ranks on every rank."""
    sent, received = _reduced(sendbuf, recvbuf)
    name = _native(op, sent)

    def start(at_once: bool) -> Any:
        data = sent.data()
        if name is None:
            return context.comm.all_gather(as_bytes(data), async_op=at_once)
        return context.comm.all_reduce(data, name, _target(received, sent, data), async_op=at_once)

    return CheckedCollective(start, _finish(context, op, name, received, sent))


def scan(context: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CheckedCollective:
    """Reduce the arrays of the ranks up to this one."""
    return _scan(context, sendbuf, recvbuf, op, context.rank + 1)


def exscan(context: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CheckedCollective:
    """Reduce the arrays of the ranks below this one. The array received on rank 0 is unchanged."""
    return _scan(context, sendbuf, recvbuf, op, context.rank)


def _scan(context: Any, sendbuf: Any, recvbuf: Any, op: Op, ranks: int) -> CheckedCollective:
    sent, received = _reduced(sendbuf, recvbuf)
    finish = _finish(context, op, None, received, sent, ranks) if ranks else None
    return CheckedCollective(lambda at_once: context.comm.all_gather(as_bytes(sent.data()), async_op=at_once), finish)


def reduce_scatter_block(context: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CheckedCollective:
    """Reduce the arrays of all ranks, and divide the result into blocks of equal size."""
    if in_place(sendbuf):
        sent = received = _all_blocks(recvbuf, context.size)
    else:
        sent, received = _all_blocks(sendbuf, context.size), whole(recvbuf)
        _check_types(sent, received)
        if sent.count != received.count * context.size:
            raise ValueError(f"mismatch in send count {sent.count} and receive count {received.count} of each rank")
    return _reduce_scatter(context, sent, received, [sent.count // context.size] * context.size, op)


def reduce_scatter(
    context: Any, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
) -> CheckedCollective:
    """Reduce the arrays of all ranks, and divide the result into blocks of `recvcounts` elements."""
    received = whole(recvbuf)
    sent = received if in_place(sendbuf) else whole(sendbuf)
    if recvcounts is None and not in_place(sendbuf):
        recvcounts = context.comm.all_gather(np.array(received.count)).tolist()
    counts = [int(count) for count in recvcounts or []]
    if len(counts) != context.size:
        raise ValueError(f"recvcounts: expected {context.size}, got {len(counts)}")
    if sum(counts) != sent.count:
        raise ValueError(f"mismatch in send count {sent.count} and sum of recvcounts {sum(counts)}")
    if sent is not received:
        if received.count != counts[context.rank]:
            raise ValueError(f"mismatch in receive count {received.count} and recvcounts {counts[context.rank]}")
        _check_types(sent, received)
    return _reduce_scatter(context, sent, received, counts, op)


def _reduce_scatter(context: Any, sent: Any, received: Any, counts: list[int], op: Op) -> CheckedCollective:
    name = _native(op, sent)
    mine = counts[context.rank]

    def start(at_once: bool) -> Any:
        data = sent.data()
        if name is not None:
            rows = [count * data.size // max(sent.count, 1) for count in counts]
            return context.comm.reduce_scatter(
                data, name, np.empty(rows[context.rank], data.dtype), rows, async_op=at_once
            )
        lengths = [count * sent.layout.size for count in counts]
        gathered = np.empty(lengths[context.rank] * context.size, np.uint8)
        expected = [lengths[context.rank]] * context.size
        return context.comm.all_to_all(as_bytes(data), gathered, lengths, expected, async_op=at_once)

    def finish(result: Array) -> None:
        if name is None:
            result = _fold(op, result.reshape(context.size, -1), sent)
        _put(received, result, mine)

    return CheckedCollective(start, finish)


def _reduced(sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
    """Return the buffers of a reduction, which must agree; in place they are one."""
    received = whole(recvbuf)
    if in_place(sendbuf):
        return received, received
    sent = whole(sendbuf)
    _check_types(sent, received)
    if sent.count != received.count:
        raise ValueError(f"mismatch in send count {sent.count} and receive count {received.count}")
    return sent, received


def _all_blocks(spec: Any, size: int) -> Buffer:
    """Return one buffer of `size` equal blocks. A count in the specification is that of one block."""
    blocks = divided(spec, size)
    return Buffer(blocks.memory, blocks.offsets[0], sum(blocks.counts), blocks.layouts[0])


def _check_types(sent: Any, received: Any) -> None:
    if sent.layout is not received.layout:
        raise ValueError("mismatch in send and receive MPI datatypes")


def _native(op: Op, sent: Any) -> str | None:
    if not isinstance(op, Op):
        raise TypeError(f"op: expected an MPI.Op, such as MPI.SUM, got {op!r}")
    return None if sent.layout.base is None else op.native_for(sent.layout.base)


def _target(received: Any, sent: Any, data: Array) -> Any:
    """Return where a native reduction writes, None if nowhere: in place if `sent` is `received`."""
    if received is None:
        return None
    target = received.target()
    if received is sent and not np.may_share_memory(target, data):
        target[:] = data
    return target


def _finish(context: Any, op: Op, name: str | None, received: Any, sent: Any, ranks: int | None = None) -> Any:
    """Return what stores the result: of ringcomm's operation, or the gathered arrays of the first ranks, folded."""
    if received is None or name is not None:
        return None if received is None else lambda _: received.store()
    op = Op(op)  # a handle of its own: the program may free its handle meanwhile

    def finish(gathered: Array) -> None:
        _put(received, _fold(op, gathered.reshape(context.size, -1)[:ranks], sent), sent.count)

    return finish


def _fold(op: Op, gathered: Array, sent: Any) -> Array:
    dtype = np.uint8 if sent.layout.base is None else sent.layout.base
    return op.fold([each.view(dtype) for each in gathered], sent.layout)


def _put(received: Any, result: Array, count: int) -> None:
    """Store `count` elements at the start of the array received."""
    target = received.target()
    target[: result.size] = result
    received.store(count * received.layout.size)
