"""Self-attention whose heads are sharded over the ranks of an axis, with grouped queries and rotary positions."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.functional import copy_to
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.seed import rank_local_rng
from ringcomm.parallel.tensor import ColumnParallelLinear, RowParallelLinear, enter

__all__ = ["ParallelAttention", "rotary_embedding"]


class ParallelAttention(nn.Module):
    """Self-attention with sharded heads: (B, S, H) → (B, S, H).

    With fewer `kv_heads` than `heads`, several queries share a key and a value (Ainslie et al., GQA, arXiv 2305.13245).
    With fewer `kv_heads` than ranks, the key and value weights are replicated, and each rank uses the head of its
    queries.

    Communication: that of entering and leaving the region; with fewer `kv_heads` than ranks, also an all-reduce of the
    gradients of the key and value weights.

    Args:
        hidden: hidden size
        heads: number of heads
        tp: the ranks that share them
        kv_heads: number of key and value heads; None: `heads`
        causal: whether a token attends to itself and those before it only, unless a call has a mask
        rotary_base: rotate queries and keys by their positions, with this base (see `rotary_embedding`); None: do not
        bias: whether the linear layers have one
        dropout: dropout probability of attention weights
        sequence_parallel: whether the input and output are sharded along the sequence

    Raises:
        ArgumentError: the heads, or `kv_heads`, cannot be divided evenly; the size of a head is odd and rotated.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        tp: Axis,
        *,
        kv_heads: int | None = None,
        causal: bool = True,
        rotary_base: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        heads = integer("heads", heads, 1)
        kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
        if hidden % heads:
            raise refuse("hidden size", f"a multiple of the {heads} heads", hidden)
        if heads % kv_heads:
            raise refuse("heads", f"a multiple of the {kv_heads} kv_heads", heads)
        tp.divide("heads", heads)
        self.shard_keys = kv_heads % tp.size == 0
        if not self.shard_keys and tp.size % kv_heads:
            raise refuse("kv_heads", f"a multiple or a divisor of tp = {tp.size}", kv_heads)
        self.tp, self.sequence_parallel, self.dropout = tp, sequence_parallel, dropout
        self.causal, self.rotary_base = causal, rotary_base
        self.width, self.kv_heads = hidden // heads, kv_heads
        if rotary_base and self.width % 2:
            raise refuse("size of a head with rotary positions", "an even number", self.width)
        keys = 2 * kv_heads * self.width  # key and value of a head are adjacent
        self.query = ColumnParallelLinear(hidden, hidden, tp, bias=bias, entered=True)
        linear = partial(ColumnParallelLinear, tp=tp, entered=True) if self.shard_keys else nn.Linear
        self.key_value = linear(hidden, keys, bias=bias)
        self.out = RowParallelLinear(hidden, hidden, tp, bias=bias, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            x: the input
            mask: in place of causality: True for the pairs that attend, or numbers that are added to their scores, of a
                shape that broadcasts to (B, heads/t, S, S)
        """
        x = enter(x, self.tp, self.sequence_parallel)
        query = self.query(x).view(*x.shape[:2], -1, self.width).transpose(1, 2)
        key, value = self._keys(x).view(*x.shape[:2], -1, 2, self.width).permute(3, 0, 2, 1, 4)
        if self.rotary_base:
            query, key = (rotary_embedding(each, self.rotary_base) for each in (query, key))
        dropout = self.dropout if self.training else 0.0
        causal = self.causal and mask is None
        grouped = query.shape[1] != key.shape[1]
        with rank_local_rng(self.tp, x.device) if dropout else nullcontext():
            y = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, enable_gqa=grouped)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        if self.shard_keys:
            keys: torch.Tensor = self.key_value(x)
            return keys
        head = self.tp.rank * self.kv_heads // self.tp.size

        def own(full: torch.Tensor) -> torch.Tensor:
            return copy_to(full, self.tp).chunk(self.kv_heads)[head]

        bias = self.key_value.bias
        return F.linear(x, own(self.key_value.weight), None if bias is None else own(bias))


def rotary_embedding(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Rotate queries or keys (..., S, D) by their positions 0 to S - 1 (RoPE: Su et al., RoFormer, arXiv 2104.09864).

    Elements i and i + D/2 of a head are a pair, as in Llama; position s rotates it by s · base^(-2i/D).
    """
    length, width = x.shape[-2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    positions, pairs = (torch.arange(n, dtype=wide, device=x.device) for n in (length, width // 2))
    angles = torch.outer(positions, base ** (-2 * pairs / width))
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
