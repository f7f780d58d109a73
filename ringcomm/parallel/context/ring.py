"""Ring attention: keys and values visit all ranks of an axis, and each attends to the block at hand."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.parallel.context.block_attention import accumulation_dtype, attend, attend_backward, merge
from ringcomm.parallel.context.sequence import HEADS, SEQUENCE, check_shapes
from ringcomm.parallel.grid import Axis

__all__ = ["ring_attention"]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attend to whole sequences: (B, heads, S/P, D) → (B, heads, S/P, D). No dropout.

    Keys and values visit all ranks, P - 1 hops around the ring; the next block travels while a rank attends to the one
    at hand. In backward they travel again, and their gradients with them (Liu et al., Ring Attention with Blockwise
    Transformers for Near-Infinite Context, arXiv 2310.01889). With `causal`, a rank skips the half of each block that
    it must not attend to.

    Communication: for b bytes of keys and values on a rank, forward sends (P-1) · b. Backward sends 2 · (P-1) · b, and
    3 · (P-1) · b in 16 bits, where gradients travel in float32.

    Args:
        query: this rank's part, (B, heads, S/P, D)
        key: (B, kv_heads, S/P, D); with fewer `kv_heads` than `heads`, several queries have the same
        value: as `key`
        axis: the P ranks over which the sequences are split
        causal: whether a token attends to itself and those before it only; sequences are then in zigzag order
        scale: multiplies the scores; None: 1/√D

    Raises:
        ArgumentError: shapes or dtypes do not fit, or the sequence is empty; with `causal`, S/P is odd.
    """
    check_shapes(query, key, value, axis, halves=causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, axis, causal, scale)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis, causal: bool, scale: float) -> Tensor:
        q, blocks = _grouped(query, key), _around(key, value, axis)
        _, block = next(blocks)
        out, lse = attend(q, block, causal, scale)
        out = out.to(accumulation_dtype(query))
        for owner, block in blocks:
            mine, theirs = _attending(axis.rank, owner, query.shape[SEQUENCE], causal)
            part = attend(q[..., mine, :], block[..., theirs, :], False, scale)
            merge(out[..., mine, :], lse[..., mine], *part)
        result = out.reshape(query.shape).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.axis, ctx.causal, ctx.scale = axis, causal, scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        axis, scale = ctx.axis, ctx.scale
        grad, q, out = (_grouped(each, key) for each in (grad, query, out))
        blocks = _around(key, value, axis)
        _, block = next(blocks)
        grad_q, *grad_own = attend_backward(grad, q, out, lse, block, ctx.causal, scale)
        receive: Callable[[], Tensor] = partial(torch.zeros_like, block, dtype=grad_q.dtype)  # by the owner
        for owner, block in blocks:
            mine, theirs = _attending(axis.rank, owner, query.shape[SEQUENCE], ctx.causal)
            ours = grad[..., mine, :], q[..., mine, :], out[..., mine, :], lse[..., mine]
            part, *grad_block = attend_backward(*ours, block[..., theirs, :], False, scale)
            grad_q[..., mine, :] += part
            total = receive()
            for each, part in zip(total, grad_block, strict=True):
                each[..., theirs, :] += part
            receive = _pass_on(total, axis)
        grads = (grad_q, *(each.add_(rest) for each, rest in zip(grad_own, receive(), strict=True)))
        whole = (each.reshape(like.shape).to(like.dtype) for each, like in zip(grads, (query, key, value), strict=True))
        return *whole, None, None, None


def _attending(rank: int, owner: int, length: int, causal: bool) -> tuple[slice, slice]:
    """Return which tokens of a rank attend to which keys of another.

    The chunks of a lower rank lie around ours: all tokens attend to its first. Those of a higher rank lie between ours:
    our second attends to both.
    """
    everything, half = slice(None), length // 2
    if not causal:
        return everything, everything
    return (everything, slice(half)) if owner < rank else (slice(half, None), everything)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return (B, heads, S/P, D) as (B · kv_heads, heads with the same key, S/P, D)."""
    return x.reshape(key.shape[0] * key.shape[HEADS], -1, *x.shape[SEQUENCE:]).contiguous()


def _around(key: Tensor, value: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank, from this one down the ring, and its keys and values, (2, B · kv_heads, 1, S/P, D).

    The next block travels while the caller uses one.
    """
    x = torch.stack((key, value)).flatten(1, 2).unsqueeze(2)
    for hop in range(axis.size - 1):
        receive = _pass_on(x, axis)
        yield (axis.rank - hop) % axis.size, x
        x = receive()
    yield (axis.rank + 1) % axis.size, x


def _pass_on(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank. Return a function that waits, and returns that of the previous rank."""
    received = torch.empty_like(x)
    following, previous = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    tag = x.numel() % 30011  # so that a part of another size is never received
    sending = dist.P2POp(dist.isend, x, following, axis.group, tag)
    works = dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, previous, axis.group, tag)])

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait
