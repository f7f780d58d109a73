"""Layers whose weights are cut over the ranks of an axis: tensor and sequence parallelism.

After Shoeybi et al., Megatron-LM (arXiv 1909.08053), and, with `sequence_parallel`, Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (arXiv 2205.05198). In shapes B are sequences, S tokens, H hidden
numbers; t is the size of the axis. A pair of layers, one cut by columns and one by rows, is entered and left once:

                        what goes in and comes out        enter: forward / backward     leave: forward / backward
    as it is            all of (B, S, H) on every rank    nothing / all-reduce          all-reduce / nothing
    sequence_parallel   (B, S/t, H), some tokens          all-gather / reduce-scatter   reduce-scatter / all-gather

Each all-reduce sends 2 · (t-1)/t · B·S·H numbers from each rank, an all-gather or a reduce-scatter half as many: a pair
sends 4 · (t-1)/t · B·S·H a step, a transformer layer of two pairs twice that, whichever way.

A layer draws its full weights as torch's own layer does and keeps its part: ranks that draw the same random numbers
(`seed_ranks`) start from the weights of one process.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn

from ringcomm.errors import integer, refuse
from ringcomm.parallel.functional import all_gather, copy_to, reduce_from, reduce_scatter
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.layout import Split, cut
from ringcomm.parallel.seed import own

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "SplitDropout",
    "SplitLayerNorm",
    "VocabParallelEmbedding",
]

SEQUENCE = -2  # the dimension of tokens


def enter(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return all_gather(x, tp, SEQUENCE) if sequence_parallel else copy_to(x, tp)


def leave(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return reduce_scatter(x, tp, SEQUENCE) if sequence_parallel else reduce_from(x, tp)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some outputs: (B, S, inputs) → (B, S, outputs/t).

    Forward and backward: those of entering; none with `entered`, for an input that the caller has entered already, as
    layers that share one do.

    Raises:
        ArgumentError: `outputs` is no multiple of the size of the axis.
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
        tp.share("outputs", outputs)
        self.tp, self.sequence_parallel, self.entered = tp, sequence_parallel, entered
        self.split = {"weight": Split(0, outputs), **({"bias": Split(0, outputs)} if bias else {})}
        keep_part(self, nn.Linear(inputs, outputs, bias), tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.entered:
            x = enter(x, self.tp, self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank takes some inputs: (B, S, inputs/t) → (B, S, outputs).

    Forward and backward: those of leaving. The bias is whole on every rank and added once, to the sum.

    Raises:
        ArgumentError: `inputs` is no multiple of the size of the axis.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, tp: Axis, *, bias: bool = True, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        tp.share("inputs", inputs)
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.split = {"weight": Split(1, inputs)}
        keep_part(self, nn.Linear(inputs, outputs, bias), tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave(F.linear(x, self.weight), self.tp, self.sequence_parallel)
        if self.bias is None:
            return y
        # Where each rank adds it to its own tokens only, its gradients have to be summed.
        return y + (copy_to(self.bias, self.tp) if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some tokens: ids (B, S) → (B, S, H).

    A rank looks up what it has and puts zeros for the rest, so that the sum is the embedding, bit for bit. A vocabulary
    that is no multiple of t is padded with rows that no id names.

    Forward and backward: those of leaving.

    Raises:
        ArgumentError: the vocabulary is so small that a rank would have padding only; or, at the call on a CPU, an id
            lies outside of it (on a GPU torch's own kernel stops then: to look would make the CPU wait).
    """

    weight: nn.Parameter

    def __init__(self, vocabulary: int, hidden: int, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.vocabulary = tp, sequence_parallel, vocabulary
        self.split = {"weight": Split(0, vocabulary)}
        share = -(-vocabulary // tp.size)
        if share * (tp.size - 1) >= vocabulary:
            others = f"more tokens than the {share * (tp.size - 1)} that {tp.size - 1} of {tp.size} ranks have"
            raise refuse("the vocabulary", others, vocabulary)
        keep_part(self, nn.Embedding(vocabulary, hidden), tp)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        check_ids("token ids", ids, self.vocabulary)
        local = ids - self.tp.rank * len(self.weight)
        # Nobody masks an id that is not in the vocabulary, which the lookup then finds out.
        elsewhere = ((local < 0) | (local >= len(self.weight))) & (ids >= 0) & (ids < self.vocabulary)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp, self.sequence_parallel)


class ParallelMLP(nn.Module):
    """Two linear layers with a GELU between them: (B, S, H) → (B, S, inner/t) → (B, S, H).

    The first is cut by columns, since GELU(a + b) is not GELU(a) + GELU(b): cut by rows, its sums would have to be put
    together before the GELU. So each rank has whole numbers in the middle, and the second takes them as they are, by
    rows.

    Forward and backward: those of entering and of leaving.
    """

    def __init__(self, hidden: int, inner: int, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden, inner, tp, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(inner, hidden, tp, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class ParallelAttention(nn.Module):
    """Causal self-attention of which each rank has some heads: (B, S, H) → (B, S, H).

    With `kv_heads` fewer than `heads`, several queries share a key and a value (Ainslie et al., GQA, arXiv 2305.13245).
    If there are fewer of them than ranks, each rank has the weights of all and uses the head that its queries share.

    Forward and backward: those of entering and of leaving; with fewer key heads than ranks, an all-reduce of their
    gradients too.

    Raises:
        ArgumentError: heads, or key heads, that cannot be shared evenly.
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
        kv_heads = heads if kv_heads is None else integer("key heads", kv_heads, 1)
        if hidden % heads:
            raise refuse("the hidden size", f"a multiple of the {heads} heads", hidden)
        if heads % kv_heads:
            raise refuse("heads", f"a multiple of the {kv_heads} key heads", heads)
        tp.share("heads", heads)
        self.cut_keys = kv_heads % tp.size == 0
        if not self.cut_keys and tp.size % kv_heads:
            raise refuse("key heads", f"a multiple or a divisor of tp = {tp.size}", kv_heads)
        self.tp, self.sequence_parallel, self.dropout = tp, sequence_parallel, dropout
        self.width, self.kv_heads = hidden // heads, kv_heads
        keys = 2 * kv_heads * self.width  # a head's key, then its value
        self.query = ColumnParallelLinear(hidden, hidden, tp, entered=True)
        linear = partial(ColumnParallelLinear, tp=tp, entered=True) if self.cut_keys else nn.Linear
        self.key_value = linear(hidden, keys)
        self.out = RowParallelLinear(hidden, hidden, tp, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = enter(x, self.tp, self.sequence_parallel)
        query = self.query(x).view(*x.shape[:2], -1, self.width).transpose(1, 2)
        key, value = self._keys(x).view(*x.shape[:2], -1, 2, self.width).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        grouped = query.shape[1] != key.shape[1]
        with own(self.tp, x.device) if dropout else nullcontext():
            y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        if self.cut_keys:
            keys: torch.Tensor = self.key_value(x)
            return keys
        mine = self.tp.rank * self.kv_heads // self.tp.size
        whole = (getattr(self.key_value, name) for name in ("weight", "bias"))
        weight, bias = (copy_to(each, self.tp).chunk(self.kv_heads)[mine] for each in whole)
        return F.linear(x, weight, bias)


class SplitLayerNorm(nn.LayerNorm):
    """A LayerNorm of this rank's tokens, (B, S/t, H) → (B, S/t, H).

    Forward: nothing. Backward: an all-reduce of the gradients of weight and bias, which saw these tokens only.
    """

    def __init__(self, hidden: int, tp: Axis) -> None:
        super().__init__(hidden)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (copy_to(whole, self.tp) for whole in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SplitDropout(nn.Dropout):
    """A dropout of this rank's tokens, or heads: each rank draws its own. No communication."""

    def __init__(self, p: float, tp: Axis) -> None:
        super().__init__(p)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return x
        with own(self.tp, x.device):
            return super().forward(x)


def keep_part(layer: nn.Module, full: nn.Module, tp: Axis) -> None:
    """Give `layer` the parameters of `full`: this rank's part of those that its `split` names."""
    for name in ("weight", "bias"):
        whole = getattr(full, name, None)
        split = layer.split.get(name)  # type: ignore[union-attr, operator]
        part = whole if whole is None or split is None else nn.Parameter(cut(whole.detach(), split, tp).clone())
        layer.register_parameter(name, part)


def check_ids(what: str, ids: torch.Tensor, vocabulary: int) -> None:
    """Refuse ids that are not in the vocabulary; of a GPU nothing, whose values the CPU would have to wait for."""
    if ids.numel() and ids.device.type == "cpu":
        least, most = (int(each) for each in ids.aminmax())
        if least < 0 or most >= vocabulary:
            raise refuse(what, f"numbers from 0 to {vocabulary - 1}", f"some from {least} to {most}")
