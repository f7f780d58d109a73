"""Attention to sequences that are split over the ranks of an axis: context parallelism, for long sequences.

Each of P ranks has S/P of the S tokens. All of a transformer but attention treats tokens one by one; there,
`ring_attention` or `ulysses_attention` replaces `scaled_dot_product_attention`.

A sequence is cut into 2P chunks, and rank r has chunks r and 2P - 1 - r (zigzag order): under a causal mask, all ranks
then do the same work. On 2 ranks, 0 to 7 becomes 0 1 6 7 and 2 3 4 5.

Shapes are the same on all ranks. Run forward and backward inside `grid.abort_on_error()`, as `Pipeline` does, so that a
rank that fails leaves no other waiting.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.parallel.block_attention import accumulation_dtype, attend, attend_backward, merge
from ringcomm.parallel.functional import all_to_all, gather_from
from ringcomm.parallel.grid import Axis

__all__ = ["join_sequence", "ring_attention", "sequence_positions", "split_sequence", "ulysses_attention"]

HEADS, SEQUENCE = 1, 2  # dimensions


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
    _check(query, key, value, axis, halves=causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, axis, causal, scale)  # type: ignore[no-untyped-call]
    return out


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axis,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    zigzag: bool = True,
) -> Tensor:
    """Attend to whole sequences, with heads/P heads on each rank: (B, heads, S/P, D) → (B, heads, S/P, D).

    An all-to-all exchanges parts of the sequence for heads, and another turns the output back (Jacobs et al., DeepSpeed
    Ulysses, arXiv 2309.14509).

    Communication: forward and backward each send (P-1)/P of this rank's queries, keys, values and outputs. With fewer
    `kv_heads` than ranks, keys and values are repeated to P heads.

    Args:
        query: as those of `ring_attention`, like all arguments up to `scale`
        dropout: dropout probability of attention weights; torch's generator must differ by rank
        zigzag: False if rank r has the r-th of P parts of the sequences

    Raises:
        ArgumentError: as in `ring_attention`; or `heads` is not a multiple of P, or `kv_heads` neither a multiple nor a
            divisor.
    """
    reorder = causal and zigzag
    _check(query, key, value, axis, halves=reorder)
    axis.divide("heads of the queries", query.shape[HEADS])
    kv_heads = key.shape[HEADS]
    if kv_heads % axis.size:
        if axis.size % kv_heads:
            raise refuse("heads of the keys", f"a multiple or a divisor of {axis.name} = {axis.size}", kv_heads)
        key, value = (each.repeat_interleave(axis.size // kv_heads, HEADS) for each in (key, value))
    query, key, value = (all_to_all(each, axis, HEADS, SEQUENCE) for each in (query, key, value))
    order = _zigzag(query.shape[SEQUENCE], axis).to(query.device)
    if reorder:
        query, key, value = (each.index_select(SEQUENCE, order.argsort()) for each in (query, key, value))
    grouped = query.shape[HEADS] != key.shape[HEADS]
    out = F.scaled_dot_product_attention(query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped)
    return all_to_all(out.index_select(SEQUENCE, order) if reorder else out, axis, SEQUENCE, HEADS)


def _check(query: Tensor, key: Tensor, value: Tensor, axis: Axis, *, halves: bool) -> None:
    if query.dim() != 4 or not query.numel():
        raise refuse("shape of the queries", "(B, heads, S/P, D), none of them 0", tuple(query.shape))
    batch, heads, length, width = query.shape
    if key.shape != value.shape or key.shape != (batch, *key.shape[1:2], length, width) or not key.numel():
        got = f"{tuple(key.shape)} and {tuple(value.shape)}"
        raise refuse("shapes of keys and values", f"({batch}, kv_heads, {length}, {width})", got)
    if heads % key.shape[HEADS]:
        raise refuse("heads of the queries", f"a multiple of the {key.shape[HEADS]} of the keys", heads)
    kinds = {f"{each.dtype} on {each.device}" for each in (query, key, value)}
    if len(kinds) > 1 or not query.is_floating_point():
        raise refuse("queries, keys and values", "one floating-point dtype and device", " and ".join(sorted(kinds)))
    if halves and axis.size > 1 and length % 2:
        raise refuse("length of this rank's part, two chunks", "an even number", length)


# --- Parts of a sequence ----------------------------------------------------------------------------------------------


def split_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return this rank's part of a sequence that all ranks have: of ids or targets, (B, S) → (B, S/P).

    No communication, and in backward the gradient of this part only.

    Raises:
        ArgumentError: S is not a multiple of 2P.
    """
    return x.index_select(dim, sequence_positions(x.shape[dim], axis).to(x.device))


def join_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return the sequence of which `split_sequence` gave each rank its part.

    Forward: all-gather, sends (P-1)/P of the sequence. Backward: each rank takes its part, no communication.
    """
    x = gather_from(x, axis, dim)
    return x.index_select(dim, _zigzag(x.shape[dim], axis).argsort().to(x.device))


def sequence_positions(length: int, axis: Axis) -> Tensor:
    """Return the positions of this rank's tokens in a sequence of that length.

    Raises:
        ArgumentError: the length is not a multiple of 2P, or of 1 for one rank.
    """
    if axis.size > 1 and length % (2 * axis.size):
        raise refuse("length of a sequence", f"a multiple of 2 · {axis.name} = {2 * axis.size}", length)
    return _zigzag(length, axis).chunk(axis.size)[axis.rank]


def _zigzag(length: int, axis: Axis) -> Tensor:
    """Return the positions of all ranks' tokens."""
    chunks = torch.arange(length).tensor_split(2 * axis.size)
    return torch.cat([chunk for rank in range(axis.size) for chunk in (chunks[rank], chunks[-1 - rank])])


# --- The ring ---------------------------------------------------------------------------------------------------------


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
