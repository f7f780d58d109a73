"""Layers whose weights are sharded over the ranks of an axis: tensor and sequence parallelism.

After Shoeybi et al., Megatron-LM (arXiv 1909.08053), and, with `sequence_parallel`, Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (arXiv 2205.05198). Shapes are (B, S, H): batch, sequence, hidden
size; t is the size of the axis. A column-parallel layer enters the sharded region, a row-parallel layer leaves it:

=================  =============================  ===========================  ===========================
Mode               Outside the region             Enter: forward / backward    Leave: forward / backward
=================  =============================  ===========================  ===========================
default            (B, S, H), same on all ranks   none / all-reduce            all-reduce / none
sequence_parallel  (B, S/t, H)                    all-gather / reduce-scatter  reduce-scatter / all-gather
=================  =============================  ===========================  ===========================

Each rank sends 2 · (t-1)/t · B·S·H elements in an all-reduce, half as many in an all-gather or reduce-scatter. In both
modes a pair of layers sends 4 · (t-1)/t · B·S·H per step, and a transformer layer, two pairs, twice that.

A layer initializes its full weights as torch's layer does and keeps its shard. Ranks with equal random numbers
(`seed_ranks`) therefore start from the weights of one process.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.functional import all_gather, copy_to, reduce_from, reduce_scatter
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.seed import rank_local_rng
from ringcomm.parallel.sharding import ShardSpec, shard_of

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "SequenceParallelDropout",
    "SequenceParallelLayerNorm",
    "VocabParallelEmbedding",
]

SEQUENCE = -2  # dimension


def enter(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return all_gather(x, tp, SEQUENCE) if sequence_parallel else copy_to(x, tp)


def leave(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return reduce_scatter(x, tp, SEQUENCE) if sequence_parallel else reduce_from(x, tp)


class ColumnParallelLinear(nn.Module):
    """A linear layer with sharded outputs: (B, S, inputs) → (B, S, outputs/t).

    Communication: that of entering the region; none with `entered=True`, for an input inside the region, as of layers
    that share one.

    Raises:
        ArgumentError: `outputs` is not a multiple of t.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        tp: Axis,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        entered: bool = False,
    ) -> None:
        super().__init__()
        tp.divide("outputs", outputs)
        self.tp, self.sequence_parallel, self.entered = tp, sequence_parallel, entered
        self.shard_specs = {"weight": ShardSpec(0, outputs), **({"bias": ShardSpec(0, outputs)} if bias else {})}
        keep_shard(self, nn.Linear(inputs, outputs, bias), tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.entered:
            x = enter(x, self.tp, self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer with sharded inputs: (B, S, inputs/t) → (B, S, outputs).

    Communication: that of leaving the region. The bias is replicated and added once, to the sum.

    Raises:
        ArgumentError: `inputs` is not a multiple of t.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, tp: Axis, *, bias: bool = True, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        tp.divide("inputs", inputs)
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.shard_specs = {"weight": ShardSpec(1, inputs)}
        keep_shard(self, nn.Linear(inputs, outputs, bias), tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave(F.linear(x, self.weight), self.tp, self.sequence_parallel)
        if self.bias is None:
            return y
        # Each rank adds it to its tokens only, so its gradients must be summed.
        return y + (copy_to(self.bias, self.tp) if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(nn.Module):
    """An embedding sharded over the vocabulary: ids (B, S) → (B, S, H).

    Each rank looks up its rows and contributes zeros for the others, so the sum has the bits of the full embedding. A
    vocabulary that is not a multiple of t is padded with unused rows.

    Communication: that of leaving the region.

    Raises:
        ArgumentError: the shard of a rank would be padding only; or, in a call on a CPU, an id is not in the vocabulary
            (on a GPU torch's kernel asserts: a check here would synchronize).
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden: int, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.vocab_size = tp, sequence_parallel, vocab_size
        self.shard_specs = {"weight": ShardSpec(0, vocab_size)}
        share = -(-vocab_size // tp.size)
        if share * (tp.size - 1) >= vocab_size:
            least = share * (tp.size - 1) + 1
            raise refuse("vocab_size", f"{least} or more, a row for each of {tp.size} ranks", vocab_size)
        keep_shard(self, nn.Embedding(vocab_size, hidden), tp)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        check_ids("token ids", ids, self.vocab_size)
        local = ids - self.tp.rank * len(self.weight)
        # An id outside the vocabulary is not masked, so that the lookup fails.
        elsewhere = ((local < 0) | (local >= len(self.weight))) & (ids >= 0) & (ids < self.vocab_size)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp, self.sequence_parallel)


class ParallelMLP(nn.Module):
    """Two linear layers with a GELU between them: (B, S, H) → (B, S, inner/t) → (B, S, H).

    The first is column-parallel: GELU(a + b) is not GELU(a) + GELU(b), so partial sums would have to be reduced before
    the GELU. The second is row-parallel and takes the sharded activations as they are.

    Communication: that of entering and leaving the region.
    """

    def __init__(self, hidden: int, inner: int, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden, inner, tp, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(inner, hidden, tp, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class ParallelAttention(nn.Module):
    """Causal self-attention with sharded heads: (B, S, H) → (B, S, H).

    With fewer `kv_heads` than `heads`, several queries share a key and a value (Ainslie et al., GQA, arXiv 2305.13245).
    With fewer `kv_heads` than ranks, the key and value weights are replicated, and each rank uses the head of its
    queries.

    Communication: that of entering and leaving the region; with fewer `kv_heads` than ranks, also an all-reduce of the
    gradients of the key and value weights.

    Raises:
        ArgumentError: the heads, or `kv_heads`, cannot be divided evenly.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        tp: Axis,
        *,
        kv_heads: int | None = None,
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
        self.width, self.kv_heads = hidden // heads, kv_heads
        keys = 2 * kv_heads * self.width  # key and value of a head are adjacent
        self.query = ColumnParallelLinear(hidden, hidden, tp, entered=True)
        linear = partial(ColumnParallelLinear, tp=tp, entered=True) if self.shard_keys else nn.Linear
        self.key_value = linear(hidden, keys)
        self.out = RowParallelLinear(hidden, hidden, tp, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = enter(x, self.tp, self.sequence_parallel)
        query = self.query(x).view(*x.shape[:2], -1, self.width).transpose(1, 2)
        key, value = self._keys(x).view(*x.shape[:2], -1, 2, self.width).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        grouped = query.shape[1] != key.shape[1]
        with rank_local_rng(self.tp, x.device) if dropout else nullcontext():
            y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        if self.shard_keys:
            keys: torch.Tensor = self.key_value(x)
            return keys
        head = self.tp.rank * self.kv_heads // self.tp.size
        full = (getattr(self.key_value, name) for name in ("weight", "bias"))
        weight, bias = (copy_to(each, self.tp).chunk(self.kv_heads)[head] for each in full)
        return F.linear(x, weight, bias)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """A LayerNorm of this rank's tokens: (B, S/t, H) → (B, S/t, H).

    Forward: no communication. Backward: all-reduce of the gradients of weight and bias, each a sum over these tokens.
    """

    def __init__(self, hidden: int, tp: Axis) -> None:
        super().__init__(hidden)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (copy_to(full, self.tp) for full in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SequenceParallelDropout(nn.Dropout):
    """A dropout of sharded activations, with different random numbers on each rank. No communication."""

    def __init__(self, p: float, tp: Axis) -> None:
        super().__init__(p)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return x
        with rank_local_rng(self.tp, x.device):
            return super().forward(x)


def keep_shard(layer: nn.Module, full: nn.Module, tp: Axis) -> None:
    """Give `layer` the parameters of `full`: this rank's shard of those in its `shard_specs`."""
    for name in ("weight", "bias"):
        parameter = getattr(full, name, None)
        spec = layer.shard_specs.get(name)  # type: ignore[union-attr, operator]
        if parameter is not None and spec:
            parameter = nn.Parameter(shard_of(parameter.detach(), spec, tp).clone())
        layer.register_parameter(name, parameter)


def check_ids(what: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary. On a GPU do nothing: the check would synchronize."""
    if ids.numel() and ids.device.type == "cpu":
        least, most = (int(each) for each in ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise refuse(what, f"numbers from 0 to {vocab_size - 1}", f"some from {least} to {most}")
