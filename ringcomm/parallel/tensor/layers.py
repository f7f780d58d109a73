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

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.distributed.tensor import DTensor

from ringcomm.errors import refuse
from ringcomm.parallel.collectives import all_gather, copy_to, reduce_from, reduce_scatter
from ringcomm.parallel.grid import Axis
from ringcomm.parallel.sharding import ShardSpec, as_dtensor, as_shard, shard_of
from ringcomm.parallel.tensor.overlap import SEQUENCE, enter_linear

__all__ = [
    "ColumnParallelLinear",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]


def enter(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return all_gather(x, tp, SEQUENCE) if sequence_parallel else copy_to(x, tp)


def leave(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> torch.Tensor:
    return reduce_scatter(x, tp, SEQUENCE) if sequence_parallel else reduce_from(x, tp)


class ShardedLayer(nn.Module):
    """A layer that keeps this rank's shard of the parameters in its `shard_specs`.

    Its `state_dict` contains them as DTensors over the axis, without padding, as that of torch's `fully_shard` does, so
    torch's tools can gather and reshard them. `load_state_dict` takes DTensors, full tensors and local shards.
    """

    tp: Axis
    shard_specs: dict[str, ShardSpec]

    def keep_shard(self, full: nn.Module) -> None:
        """Take the parameters of a layer: this rank's shard of those that are sharded."""
        for name in ("weight", "bias"):
            parameter = getattr(full, name, None)
            spec = self.shard_specs.get(name)
            if parameter is not None and spec:
                parameter = nn.Parameter(shard_of(parameter.detach(), spec, self.tp).clone())
            self.register_parameter(name, parameter)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, spec in self.shard_specs.items():
            value = destination[prefix + name]
            if not isinstance(value, DTensor):  # of fully_shard
                destination[prefix + name] = as_dtensor(value, spec, self.tp)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, spec in self.shard_specs.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(getattr(self, name), DTensor):
                state_dict[prefix + name] = as_shard(value, spec, self.tp)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class ShardedLinear(ShardedLayer):
    """A linear layer whose weight is sharded along a dimension: 0, and then its bias too, or 1."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, tp: Axis, dim: int, bias: bool, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp, self.sequence_parallel = tp, sequence_parallel
        spec = ShardSpec(dim, in_features if dim else out_features)
        self.shard_specs = {"weight": spec} | ({"bias": spec} if bias and not dim else {})
        self.keep_shard(nn.Linear(in_features, out_features, bias))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, tp={self.tp.size}"


class ColumnParallelLinear(ShardedLinear):
    """A linear layer with sharded outputs: (B, S, in_features) → (B, S, out_features/t).

    Communication: that of entering the region, in backward while the gradients of the parameters are computed; none
    with `entered=True`, for an input inside the region.

    Raises:
        ArgumentError: `out_features` is not a multiple of t; an output layer may be a `VocabParallelHead`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Axis,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        entered: bool = False,
    ) -> None:
        tp.divide("out_features", out_features)
        super().__init__(in_features, out_features, tp, 0, bias, sequence_parallel)
        self.entered = entered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = partial(F.linear, weight=self.weight, bias=self.bias)
        if self.entered:
            return linear(x)
        return enter_linear(x, [linear], [self.weight], self.tp, self.sequence_parallel)[0]


class RowParallelLinear(ShardedLinear):
    """A linear layer with sharded inputs: (B, S, in_features/t) → (B, S, out_features).

    Communication: that of leaving the region. The bias is replicated and added once, to the sum.

    Raises:
        ArgumentError: `in_features` is not a multiple of t.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: Axis, *, bias: bool = True, sequence_parallel: bool = False
    ) -> None:
        tp.divide("in_features", in_features)
        super().__init__(in_features, out_features, tp, 1, bias, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave(F.linear(x, self.weight), self.tp, self.sequence_parallel)
        if self.bias is None:
            return y
        # Each rank adds it to its tokens only, so its gradients must be summed.
        bias = copy_to(self.bias, self.tp) if self.sequence_parallel else self.bias
        return y + bias.to(y.dtype)  # under autocast, which leaves an addition as it is, y has 16 bits


class VocabParallelEmbedding(ShardedLayer):
    """An embedding sharded over the vocabulary: ids (B, S) → (B, S, H).

    Each rank looks up its rows and contributes zeros for the others, so the sum has the bits of the full embedding. A
    vocabulary that is not a multiple of t is padded with unused rows.

    Communication: that of leaving the region.

    Raises:
        ArgumentError: the shard of a rank would be padding only; or, in a call on a CPU, an id is not in the vocabulary
            (on a GPU torch's kernel asserts: a check here would synchronize).
    """

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.tp, self.sequence_parallel = tp, sequence_parallel
        _check_rows("num_embeddings", num_embeddings, tp)
        self.shard_specs = {"weight": ShardSpec(0, num_embeddings)}
        self.keep_shard(nn.Embedding(num_embeddings, embedding_dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return leave(self.partial(ids), self.tp, self.sequence_parallel)

    def partial(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what this rank contributes: (B, S, H), before the sum over the ranks."""
        check_ids("token ids", ids, self.num_embeddings)
        local = ids - self.tp.rank * len(self.weight)
        # An id outside the vocabulary is not masked, so that the lookup fails.
        elsewhere = ((local < 0) | (local >= len(self.weight))) & (ids >= 0) & (ids < self.num_embeddings)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return x.masked_fill(elsewhere.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp.size}"


class VocabParallelHead(ShardedLinear):
    """An output layer sharded over the vocabulary: (B, S, in_features) → logits (B, S, V/t).

    A vocabulary that is not a multiple of t is padded with unused rows, whose logits are zero; tell
    `vocab_parallel_cross_entropy` its `vocab_size`. To tie it to a `VocabParallelEmbedding`, give it that one's weight.

    Communication: that of entering the region, in backward while the gradients of the parameters are computed.

    Raises:
        ArgumentError: the shard of a rank would be padding only.
    """

    def __init__(
        self, in_features: int, vocab_size: int, tp: Axis, *, bias: bool = False, sequence_parallel: bool = False
    ) -> None:
        _check_rows("vocab_size", vocab_size, tp)
        super().__init__(in_features, vocab_size, tp, 0, bias, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = partial(F.linear, weight=self.weight, bias=self.bias)
        return enter_linear(x, [linear], [self.weight], self.tp, self.sequence_parallel)[0]


class MLPOptions(TypedDict, total=False):
    """The options of a ParallelMLP."""

    activation: Callable[[torch.Tensor], torch.Tensor]
    gated: bool
    bias: bool
    sequence_parallel: bool


class ParallelMLP(nn.Module):
    """Linear layers with an activation between them: (B, S, H) → (B, S, inner/t) → (B, S, H).

    The first is column-parallel: GELU(a + b) is not GELU(a) + GELU(b), so partial sums would have to be reduced before
    the GELU. The second is row-parallel and takes the sharded activations as they are.

    GPT-2: `activation=partial(F.gelu, approximate="tanh")`. Llama: `activation=F.silu, gated=True, bias=False`.

    Communication: that of entering and leaving the region.

    Args:
        hidden: hidden size
        inner: size of the activations
        tp: the ranks with the shards of the layers
        activation: an elementwise function
        gated: down(activation(gate(x)) · up(x)) instead of down(activation(up(x))) (Shazeer, GLU Variants Improve
            Transformer, arXiv 2002.05202)
        bias: whether the linear layers have one
        sequence_parallel: whether the input and output are sharded along the sequence
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        tp: Axis,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.activation, self.sequence_parallel = tp, activation, sequence_parallel
        self.up = ColumnParallelLinear(hidden, inner, tp, bias=bias, entered=True)
        self.gate = ColumnParallelLinear(hidden, inner, tp, bias=bias, entered=True) if gated else None
        self.down = RowParallelLinear(inner, hidden, tp, bias=bias, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.gate, self.up] if self.gate else [self.up]
        y, *up = enter_linear(x, layers, [layer.weight for layer in layers], self.tp, self.sequence_parallel)
        y = self.activation(y)
        out: torch.Tensor = self.down(y * up[0] if up else y)
        return out


def _check_rows(what: str, vocab_size: int, tp: Axis) -> None:
    """Raise ArgumentError if the shard of a vocabulary, with padding at its end, would be padding only."""
    least = -(-vocab_size // tp.size) * (tp.size - 1) + 1
    if vocab_size < least:
        raise refuse(what, f"{least} or more, a row for each of {tp.size} ranks", vocab_size)


def check_ids(what: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary. On a GPU do nothing: the check would synchronize."""
    if ids.numel() and ids.device.type == "cpu":
        least, most = (int(each) for each in ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise refuse(what, f"numbers from 0 to {vocab_size - 1}", f"some from {least} to {most}")
