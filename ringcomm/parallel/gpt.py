"""A small GPT of parallel layers, divided into pipeline stages.

Chunk c of pipeline rank r is stage c · p + r of the model. On every grid the model starts from the same full weights,
because each is drawn from the seed and its name, then sharded. Parameters have the names of the full model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import refuse
from ringcomm.parallel.attention import ParallelAttention
from ringcomm.parallel.functional import copy_to
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.loss import vocab_parallel_cross_entropy
from ringcomm.parallel.norm import SequenceParallelDropout, SequenceParallelLayerNorm, SequenceParallelRMSNorm
from ringcomm.parallel.seed import derive_seed
from ringcomm.parallel.sharding import collect_shard_specs, full_shape, shard_of
from ringcomm.parallel.tensor import ParallelMLP, VocabParallelEmbedding, enter

__all__ = ["GPTConfig", "GPTStage", "gpt_loss", "gpt_stages", "gpt_tied_weights"]


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT. The defaults are those of GPT-2, except that its GELU is the tanh approximation.

    Llama: `activation=F.silu, gated=True, bias=False, rms_norm=True, rotary_base=10_000.0`, and its `inner`.

    Attributes:
        vocab_size: size of the vocabulary
        context: maximum sequence length
        layers: number of transformer layers
        hidden: hidden size
        heads: number of attention heads
        kv_heads: number of key and value heads, fewer for grouped queries; None: `heads`
        inner: size of the activations in an MLP; None: 4 · hidden
        activation: elementwise function in an MLP
        gated: multiply the activations of an MLP by a second linear layer
        bias: whether the linear layers have one
        rms_norm: RMSNorm instead of LayerNorm
        eps: added to the variance in a norm
        rotary_base: rotate queries and keys by their positions, with this base; None: learn an embedding of positions
        dropout: dropout probability of embeddings, attention weights and residual branches
        tied: the output layer shares the weights of the embedding
        sequence_parallel: shard norms and dropout along the sequence, whose length must be a multiple of tp
        recompute: recompute the activations of each layer in backward (Chen et al., arXiv 1604.06174)
    """

    vocab_size: int
    context: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    inner: int | None = None
    activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    gated: bool = False
    bias: bool = True
    rms_norm: bool = False
    eps: float = 1e-5
    rotary_base: float | None = None
    dropout: float = 0.0
    tied: bool = True
    sequence_parallel: bool = False
    recompute: bool = False


def gpt_stages(config: GPTConfig, grid: Grid, *, chunks: int = 1, seed: int = 0) -> list["GPTStage"]:
    """Return this rank's stages of the model, `chunks` of them, all with the same number of layers.

    Raises:
        ArgumentError: the layers, heads or hidden size cannot be divided evenly.
    """
    pp, stages = grid.pp, grid.pp.size * chunks
    if config.layers % stages:
        raise refuse("layers", f"a multiple of pp {pp.size} · chunks {chunks} = {stages}", config.layers)
    layers_per_stage = config.layers // stages
    chunks_of_rank = []
    for stage in range(pp.rank, stages, pp.size):
        layers = range(stage * layers_per_stage, (stage + 1) * layers_per_stage)
        chunks_of_rank.append(GPTStage(config, grid.tp, layers, first=stage == 0, last=stage == stages - 1))
        initialize(chunks_of_rank[-1], config, grid.tp, seed)
    if config.tied and pp.size == 1:
        chunks_of_rank[-1].embedding = chunks_of_rank[0].embedding
    return chunks_of_rank


def gpt_tied_weights(stages: Sequence["GPTStage"], grid: Grid) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Return the weights that the first and last stage share, each with the process group that sums its gradients."""
    shared = (stage for stage in stages if stage.config.tied and (stage.first or stage.last))
    return [(stage.embedding.weight, grid.ends.group) for stage in shared] if grid.pp.size > 1 else []


def gpt_loss(config: GPTConfig, grid: Grid) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function of the last stage: logits (B, S, V/t) and next tokens (B, S) → mean cross-entropy."""
    return partial(vocab_parallel_cross_entropy, tp=grid.tp, vocab_size=config.vocab_size)


class GPTStage(nn.Module):
    """Consecutive layers of a GPT: (B, S, H) → (B, S, H), or S/t in place of S with sequence parallelism.

    The input of the first stage is ids (B, S); the output of the last is logits (B, S, V/t).
    """

    def __init__(self, config: GPTConfig, tp: Axis, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.tp, self.first, self.last = config, tp, first, last
        sp = config.sequence_parallel
        embedding = partial(VocabParallelEmbedding, config.vocab_size, config.hidden, tp, sequence_parallel=sp)
        if first or (last and config.tied):
            self.embedding = embedding()
        if first:
            self.positions = None if config.rotary_base else nn.Embedding(config.context, config.hidden)
            self.dropout = dropout(config, tp)
        self.blocks = nn.ModuleDict({str(layer): TransformerBlock(config, tp) for layer in layers})
        if last:
            self.norm = norm(config, tp)
            if not config.tied:
                self.head = embedding()
        self.tied_copies = {"embedding.weight"} if last and config.tied and not first else set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self._embed(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.config.recompute and self.training else block(x)
        return self._logits(x) if self.last else x

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        if tokens > self.config.context:
            raise refuse("length of a sequence", f"at most {self.config.context}", tokens)
        start = 0
        if self.config.sequence_parallel:
            tokens = self.tp.divide("length of a sequence", tokens)
            start = self.tp.rank * tokens
        x: torch.Tensor = self.embedding(ids)
        if self.positions:
            positions: torch.Tensor = self.positions.weight
            if self.config.sequence_parallel:
                positions = copy_to(positions, self.tp)
            x = x + positions[start : start + tokens]
        out: torch.Tensor = self.dropout(x)
        return out

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        output = self.embedding if self.config.tied else self.head
        return F.linear(enter(self.norm(x), self.tp, self.config.sequence_parallel), output.weight)


class TransformerBlock(nn.Module):
    """A pre-norm transformer layer: (B, S, H) → (B, S, H)."""

    def __init__(self, config: GPTConfig, tp: Axis) -> None:
        super().__init__()
        hidden, sp = config.hidden, config.sequence_parallel
        self.norm_1 = norm(config, tp)
        self.attention = ParallelAttention(
            hidden,
            config.heads,
            tp,
            kv_heads=config.kv_heads,
            rotary_base=config.rotary_base,
            bias=config.bias,
            dropout=config.dropout,
            sequence_parallel=sp,
        )
        self.norm_2 = norm(config, tp)
        self.mlp = ParallelMLP(
            hidden,
            config.inner or 4 * hidden,
            tp,
            activation=config.activation,
            gated=config.gated,
            bias=config.bias,
            sequence_parallel=sp,
        )
        self.dropout = dropout(config, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return y


def norm(config: GPTConfig, tp: Axis) -> nn.Module:
    if config.sequence_parallel:
        kind = SequenceParallelRMSNorm if config.rms_norm else SequenceParallelLayerNorm
        return kind(config.hidden, tp, eps=config.eps)
    return (nn.RMSNorm if config.rms_norm else nn.LayerNorm)(config.hidden, config.eps)


def dropout(config: GPTConfig, tp: Axis) -> nn.Dropout:
    return SequenceParallelDropout(config.dropout, tp) if config.sequence_parallel else nn.Dropout(config.dropout)


def initialize(stage: GPTStage, config: GPTConfig, tp: Axis, seed: int) -> None:
    """Initialize as GPT-2 does: matrices from a normal distribution of deviation 0.02, biases zero.

    The last matrix of a residual branch is scaled by 1/√(2 · layers), because the branches add up.
    """
    specs = collect_shard_specs(stage)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                deviation = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                generator = torch.Generator().manual_seed(derive_seed(seed, name))
                full = torch.empty(full_shape(parameter, specs.get(name)), dtype=parameter.dtype)
                full.normal_(0, deviation, generator=generator)
                parameter.copy_(shard_of(full, specs[name], tp) if name in specs else full)
