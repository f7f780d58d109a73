"""Self-attention whose heads are sharded over the ranks of an axis, with grouped queries and rotary positions."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import integer, refuse, unknown
from ringcomm.layout_rules import check
from ringcomm.parallel.collectives import copy_to
from ringcomm.parallel.context.ring import ring_attention
from ringcomm.parallel.context.sequence import sequence_positions
from ringcomm.parallel.context.ulysses import ulysses_attention
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.state.seed import rank_local_rng
from ringcomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from ringcomm.parallel.tensor.overlap import enter_linear

__all__ = ["ParallelAttention", "rotary_embedding"]

CONTEXT_PARALLEL = ("ring", "ulysses")


class CoreOptions(TypedDict, total=False):
    """The options of a CoreAttention."""

    causal: bool
    dropout: float
    recompute: bool
    cp: Axis | None
    context_parallel: str


class CoreAttention(nn.Module):
    """The attention of this rank's heads to whole sequences, without parameters.

    Args:
        tp: the ranks with the other heads
        causal: whether a token attends to itself and those before it only, unless a call has a mask
        dropout: dropout probability of attention weights
        recompute: keep queries, keys and values only for backward, and attend again there: selective recomputation
            (Korthikanti et al., arXiv 2205.05198). It frees 3 · heads/t · B · S² elements, the scores, unless they are
            not stored: without dropout and a mask, torch has kernels that do not.
        cp: the ranks over which sequences are split (see `split_sequence`); None: sequences are whole
        context_parallel: the attention over `cp`, "ring" or "ulysses"

    Raises:
        ArgumentError: `context_parallel` is unknown, or a ring that would drop attention weights.
    """

    def __init__(
        self,
        tp: Axis,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        recompute: bool = False,
        cp: Axis | None = None,
        context_parallel: str = "ring",
    ) -> None:
        super().__init__()
        if context_parallel not in CONTEXT_PARALLEL:
            raise unknown("context_parallel", context_parallel, CONTEXT_PARALLEL)
        self.tp, self.causal, self.dropout, self.recompute = tp, causal, dropout, recompute
        self.cp, self.context_parallel = cp if cp and cp.size > 1 else None, context_parallel
        if self.cp and context_parallel == "ring" and dropout:
            raise refuse("dropout of attention weights in a ring", "0, or context_parallel='ulysses'", dropout)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.recompute and self.training:
            out: torch.Tensor = checkpoint(self._attend, query, key, value, mask, use_reentrant=False)
            return out
        return self._attend(query, key, value, mask)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.cp and mask is not None:
            raise refuse("mask of sequences split over cp", None, "one")
        if self.cp and self.context_parallel == "ring":
            return ring_attention(query, key, value, self.cp, causal=self.causal)
        causal = self.causal and mask is None
        grouped = query.shape[1] != key.shape[1]
        with rank_local_rng(self.tp, query.device) if dropout else nullcontext():
            if self.cp:
                return ulysses_attention(query, key, value, self.cp, causal=causal, dropout=dropout)
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, enable_gqa=grouped)


class ParallelAttention(nn.Module):
    """Self-attention with sharded heads: (B, S, H) → (B, S, H).

    With fewer `kv_heads` than `heads`, queries have keys and values in common (Ainslie et al., GQA, arXiv 2305.13245).
    With fewer `kv_heads` than ranks, the key and value weights are replicated, and each rank uses the head of its
    queries.

    Communication: that of entering and leaving the region; with fewer `kv_heads` than ranks, also an all-reduce of the
    gradients of the key and value weights; with `cp`, that of ring or Ulysses attention.

    Args:
        hidden: hidden size
        heads: number of heads
        tp: the ranks with their shards
        kv_heads: number of key and value heads; None: `heads`
        rotary_base: rotate queries and keys by their positions, with this base (see `rotary_embedding`); None: do not
        bias: whether the linear layers have one
        sequence_parallel: whether the input and output are sharded along the sequence
        core: `causal`, `dropout`, `recompute`, `cp` and `context_parallel`, as those of a `CoreAttention`

    Raises:
        ArgumentError: the heads, or `kv_heads`, cannot be divided evenly; the size of a head is odd and rotated;
            or as a `CoreAttention`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        tp: Axis,
        *,
        kv_heads: int | None = None,
        rotary_base: float | None = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        **core: Unpack[CoreOptions],
    ) -> None:
        super().__init__()
        heads = integer("heads", heads, 1)
        kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
        if hidden % heads:
            raise refuse("hidden size", f"a multiple of the {heads} heads", hidden)
        if heads % kv_heads:
            raise refuse("heads", f"a multiple of the {kv_heads} kv_heads", heads)
        check(tp=tp.size, heads=heads, kv_heads=kv_heads)
        self.shard_keys = kv_heads % tp.size == 0
        self.tp, self.sequence_parallel, self.rotary_base = tp, sequence_parallel, rotary_base
        self.width, self.kv_heads = hidden // heads, kv_heads
        if rotary_base and self.width % 2:
            raise refuse("size of a head with rotary positions", "an even number", self.width)
        self.core = CoreAttention(tp, **core)
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
                shape that broadcasts to (B, heads/t, S, S); not with `cp`
        """
        weight, bias = self.own_keys()
        keys = self.key_value if self.shard_keys else partial(F.linear, weight=weight, bias=bias)
        layers: list[Callable[[torch.Tensor], torch.Tensor]] = [self.query, keys]
        weights = [self.query.weight, weight]
        query, key_value = enter_linear(x, layers, weights, self.tp, self.sequence_parallel)
        query = query.view(*query.shape[:2], -1, self.width).transpose(1, 2)
        key, value = key_value.view(*key_value.shape[:2], -1, 2, self.width).permute(3, 0, 2, 1, 4)
        if self.rotary_base:
            cp = self.core.cp
            positions = sequence_positions(query.shape[2] * cp.size, cp) if cp else None
            query, key = (rotary_embedding(each, self.rotary_base, positions) for each in (query, key))
        out: torch.Tensor = self.out(self.core(query, key, value, mask).transpose(1, 2).flatten(2))
        return out

    def own_keys(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and bias of this rank's keys and values, of which those of a head are adjacent."""
        weight, bias = self.key_value.weight, self.key_value.bias
        if self.shard_keys:
            return weight, bias
        head = self.tp.rank * self.kv_heads // self.tp.size

        def own(full: torch.Tensor) -> torch.Tensor:
            return copy_to(full, self.tp).chunk(self.kv_heads)[head]

        return own(weight), None if bias is None else own(bias)


def rotary_embedding(x: torch.Tensor, base: float = 10_000.0, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate queries or keys (..., S, D) by their positions (RoPE: Su et al., RoFormer, arXiv 2104.09864).

    The positions are S numbers; None: 0 to S - 1. Elements i and i + D/2 of a head are a pair, as in Llama; position s
    rotates it by s · base^(-2i/D).
    """
    positions = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
    return rotate(x, *rotations(positions, x.shape[-1], base, x.dtype))


def rotations(
    positions: torch.Tensor, width: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (..., D/2) of the angles by which positions (...) rotate heads of width D."""
    wide = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(width // 2, dtype=wide, device=positions.device)
    angles = positions[..., None].to(wide) * base ** (-2 * pairs / width)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of heads (..., D)."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
