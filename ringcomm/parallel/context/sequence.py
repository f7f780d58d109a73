"""Sequences that are split over the ranks of an axis.

Each of P ranks has S/P of the S tokens. All of a transformer but attention treats tokens one by one; there,
`ring_attention` or `ulysses_attention` replaces `scaled_dot_product_attention`.

A sequence is cut into 2P chunks, and rank r has chunks r and 2P - 1 - r (zigzag order): under a causal mask, all ranks
then do the same work. On 2 ranks, 0 to 7 becomes 0 1 6 7 and 2 3 4 5.

Shapes are the same on all ranks. Run forward and backward inside `grid.abort_on_error()`, as `Pipeline` does, so that a
rank that fails leaves no other waiting.
"""

import torch
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.layout_rules import broken
from ringcomm.parallel.collectives import gather_from
from ringcomm.parallel.grid import Axis

__all__ = ["HEADS", "SEQUENCE", "check_shapes", "join_sequence", "sequence_positions", "split_sequence", "zigzag_order"]

HEADS, SEQUENCE = 1, 2  # dimensions of queries, keys and values


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
    return x.index_select(dim, zigzag_order(x.shape[dim], axis).argsort().to(x.device))


def sequence_positions(length: int, axis: Axis) -> Tensor:
    """Return the positions of this rank's tokens in a sequence of that length.

    Raises:
        ArgumentError: the length is not a multiple of 2P, or of 1 for one rank.
    """
    if broken({"cp": axis.size, "seq": length}):
        raise refuse("length of a sequence", f"a multiple of 2 {axis.name} = {2 * axis.size}", length)
    return zigzag_order(length, axis).chunk(axis.size)[axis.rank]


def zigzag_order(length: int, axis: Axis) -> Tensor:
    """Return the positions of all ranks' tokens."""
    chunks = torch.arange(length).tensor_split(2 * axis.size)
    return torch.cat([chunk for rank in range(axis.size) for chunk in (chunks[rank], chunks[-1 - rank])])


def check_shapes(query: Tensor, key: Tensor, value: Tensor, axis: Axis, *, halves: bool) -> None:
    """Raise ArgumentError unless these are parts of the same sequences; with `halves`, of two chunks."""
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
