"""Ulysses attention: an all-to-all exchanges parts of the sequence for heads, and another turns the output back."""

import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_to_all
from ringcomm.parallel.context.sequence import HEADS, SEQUENCE, check_shapes, zigzag_order
from ringcomm.parallel.grid import Axis

__all__ = ["ulysses_attention"]


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
    check_shapes(query, key, value, axis, halves=reorder)
    axis.divide("heads of the queries", query.shape[HEADS])
    kv_heads = key.shape[HEADS]
    if kv_heads % axis.size:
        if axis.size % kv_heads:
            raise refuse("heads of the keys", f"a multiple or a divisor of {axis.name} = {axis.size}", kv_heads)
        key, value = (each.repeat_interleave(axis.size // kv_heads, HEADS) for each in (key, value))
    query, key, value = (all_to_all(each, axis, HEADS, SEQUENCE) for each in (query, key, value))
    order = zigzag_order(query.shape[SEQUENCE], axis).to(query.device)
    if reorder:
        query, key, value = (each.index_select(SEQUENCE, order.argsort()) for each in (query, key, value))
    grouped = query.shape[HEADS] != key.shape[HEADS]
    out = F.scaled_dot_product_attention(query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped)
    return all_to_all(out.index_select(SEQUENCE, order) if reorder else out, axis, SEQUENCE, HEADS)
