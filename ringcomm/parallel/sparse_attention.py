"""Sparse attention: masks of which keys each query attends to, for `flex_attention`, or dense for any attention.

A mask is a function of indices, as torch's `create_block_mask` takes; `flex_attention` then skips blocks without pairs
that attend. `dense_mask` makes the tensor that `ParallelAttention` takes, with the work of full attention. The masks of
Child et al., Sparse Transformers (arXiv 1904.10509), are `all_of(causal, any_of(sliding_window(n), strided(n)))`; of
Beltagy et al., Longformer (arXiv 2004.05150), `any_of(sliding_window(n), global_tokens(g))`; of Zaheer et al., BigBird
(arXiv 2007.14062), the same with `block_sparse(random_layout, block)`. No communication.
"""

from collections.abc import Callable
from functools import reduce
from operator import and_, or_

import torch

from ringcomm.errors import integer, refuse

__all__ = ["all_of", "any_of", "block_sparse", "causal", "dense_mask", "global_tokens", "sliding_window", "strided"]

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Attend to the token itself and those before it."""
    return query >= key


def sliding_window(width: int) -> Mask:
    """Attend to the tokens less than `width` away, on both sides."""
    width = integer("width", width, 1)
    return lambda _batch, _head, query, key: (query - key).abs() < width


def strided(stride: int) -> Mask:
    """Attend to every token whose distance is a multiple of `stride`."""
    stride = integer("stride", stride, 1)
    return lambda _batch, _head, query, key: (query - key) % stride == 0


def global_tokens(count: int) -> Mask:
    """Let the first `count` tokens attend to all, and all attend to them."""
    return lambda _batch, _head, query, key: (query < count) | (key < count)


def block_sparse(layout: torch.Tensor, block: int) -> Mask:
    """Let a block of queries i attend to a block of keys j where `layout[i, j]` is True; both have `block` tokens."""
    block = integer("block", block, 1)
    return lambda _batch, _head, query, key: layout[query // block, key // block]


def any_of(*masks: Mask) -> Mask:
    """Attend where one of the masks does."""
    return lambda batch, head, query, key: reduce(or_, [mask(batch, head, query, key) for mask in masks])


def all_of(*masks: Mask) -> Mask:
    """Attend where all of the masks do."""
    return lambda batch, head, query, key: reduce(and_, [mask(batch, head, query, key) for mask in masks])


def dense_mask(mask: Mask, length: int, *, heads: int = 1, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return a mask as a boolean tensor (heads, S, S); one head, unless they differ.

    Raises ArgumentError if a query attends to no key: its result would be undefined.
    """
    head, index = (torch.arange(n, device=device) for n in (heads, length))
    dense = mask(index.new_zeros(()), head.view(-1, 1, 1), index.view(-1, 1), index).expand(heads, length, length)
    if lonely := (~dense.any(-1)).nonzero().tolist():
        raise refuse("mask", "a key for every query", f"none for query {lonely[0][1]} of head {lonely[0][0]}")
    return dense
