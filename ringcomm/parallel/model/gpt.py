"""A small GPT of parallel layers, divided into pipeline stages.

Chunk c of pipeline rank r is stage c · p + r of the model. On every grid the model starts from the same full weights,
because each is drawn from the seed and its name, then sharded. Parameters have the names of the full model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import refuse, unknown
from ringcomm.layout_rules import check
from ringcomm.parallel.collectives import copy_to
from ringcomm.parallel.context.sequence import sequence_positions
from ringcomm.parallel.experts.layer import Experts
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.model.activations import sharded_checkpoint
from ringcomm.parallel.pipeline.loss import CountedLoss, count_targets
from ringcomm.parallel.sharding import collect_shard_specs, full_shape, shard_of
from ringcomm.parallel.state.seed import derive_seed
from ringcomm.parallel.tensor.attention import ParallelAttention
from ringcomm.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from ringcomm.parallel.tensor.layers import MLPOptions, ParallelMLP, VocabParallelEmbedding, VocabParallelHead
from ringcomm.parallel.tensor.overlap import enter_linear
from ringcomm.parallel.tensor.sequence_parallel import (
    SequenceParallelDropout,
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
)
from ringcomm.pipelining.schedule import PipelineSchedule, make_schedule

__all__ = ["GPTConfig", "GPTStage", "gpt_loss", "gpt_stages", "gpt_tied_weights"]

RECOMPUTE = ("full", "sharded", "selective")


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
        experts: number of experts in place of an MLP, with `top_k`, `capacity_factor` and `balance` as in
            `Experts`; 0: none
        experts_every: every n-th layer has experts, the last of each n (GShard: 2)
        dropout: dropout probability of embeddings, attention weights and residual branches
        tied: the output layer has the weights of the embedding
        sequence_parallel: shard norms and dropout along the sequence, whose length must be a multiple of tp
        recompute: what to recompute in backward: "full", or True, each layer (Chen et al., arXiv 1604.06174);
            "sharded", each layer, from inputs that the ranks of tp divide (see `sharded_checkpoint`); "selective",
            attention only (see `ParallelAttention`)
        context_parallel: the attention on a grid that splits sequences over cp, "ring" or "ulysses". Each rank then
            gets its part of ids and targets (see `split_sequence`).

    Raises:
        ArgumentError: another `recompute`, or "sharded" with `sequence_parallel`, which shards these inputs already.
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
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    balance: float = 0.01
    experts_every: int = 1
    dropout: float = 0.0
    tied: bool = True
    sequence_parallel: bool = False
    recompute: bool | Literal["full", "sharded", "selective"] = False
    context_parallel: str = "ring"

    def __post_init__(self) -> None:
        if self.recompute not in (True, False, *RECOMPUTE):
            raise unknown("recompute", self.recompute, RECOMPUTE)
        if self.recompute == "sharded" and self.sequence_parallel:
            raise refuse("recompute with sequence_parallel", "'full' or 'selective'", "'sharded'")


def gpt_stages(
    config: GPTConfig, grid: Grid, schedule: PipelineSchedule | None = None, *, seed: int = 0
) -> list["GPTStage"]:
    """Return this rank's stages of the model, as a schedule places them, all with the same number of layers.

    Without a schedule, each rank has one stage.

    Raises:
        ArgumentError: the layers, heads, hidden size or experts cannot be divided evenly.
    """
    pp = grid.pp
    schedule = schedule or make_schedule("1f1b", pp.size, 1)
    check(pp=pp.size, chunks=schedule.chunks, layers=config.layers)
    kv_heads, ffn = config.kv_heads or config.heads, config.inner or 4 * config.hidden
    check(tp=grid.tp.size, heads=config.heads, kv_heads=kv_heads, ffn=ffn)
    stages = schedule.stages
    layers_per_stage = config.layers // stages
    chunks_of_rank = []
    for stage in (schedule.stage(pp.rank, chunk) for chunk in range(schedule.chunks)):
        layers = range(stage * layers_per_stage, (stage + 1) * layers_per_stage)
        chunks_of_rank.append(GPTStage(config, grid, layers, first=stage == 0, last=stage == stages - 1))
        initialize(chunks_of_rank[-1], config, grid.tp, seed)
    if config.tied and chunks_of_rank[0].first and chunks_of_rank[-1].last:
        chunks_of_rank[-1].embedding = chunks_of_rank[0].embedding
    return chunks_of_rank


def gpt_tied_weights(stages: Sequence["GPTStage"], grid: Grid) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Return the weight that both the first and last stage have, with the process group that sums its gradients.

    Nothing if one rank has both stages.
    """
    tied = [stage for stage in stages if stage.config.tied and stage.first != stage.last]
    return [(tied[0].embedding.weight, grid.ends.group)] if len(tied) == 1 else []


def gpt_loss(config: GPTConfig, grid: Grid) -> CountedLoss:
    """Return the loss function of the last stage: logits (B, S, V/t) and next tokens (B, S) → mean cross-entropy.

    Targets of -100 are ignored; a `Pipeline` averages over the others of a whole batch.
    """
    return CountedLoss(partial(vocab_parallel_cross_entropy, tp=grid.tp, vocab_size=config.vocab_size), count_targets)


class GPTStage(nn.Module):
    """Consecutive layers of a GPT: (B, S, H) → (B, S, H), or S/t in place of S with sequence parallelism.

    The input of the first stage is ids (B, S); the output of the last is logits (B, S, V/t). With `cp`, S is the length
    of this rank's part of the sequences.
    """

    def __init__(self, config: GPTConfig, grid: Grid, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.first, self.last = config, grid.tp, grid.cp, first, last
        tp, sp = grid.tp, config.sequence_parallel
        embedding = partial(VocabParallelEmbedding, config.vocab_size, config.hidden, tp, sequence_parallel=sp)
        if first or (last and config.tied):
            self.embedding = embedding()
        if first:
            self.positions = None if config.rotary_base else nn.Embedding(config.context, config.hidden)
            self.dropout = dropout(config, tp)
        self.blocks = nn.ModuleDict({str(layer): TransformerBlock(config, grid, layer) for layer in layers})
        if last:
            self.norm = norm(config, tp)
            if not config.tied:
                self.head = VocabParallelHead(config.hidden, config.vocab_size, tp, sequence_parallel=sp)
        self.tied_copies = {"embedding.weight"} if last and config.tied and not first else set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self._embed(x)
        recompute = self.config.recompute if self.training else False
        for block in self.blocks.values():
            if recompute == "sharded":
                x = sharded_checkpoint(block, x, self.tp)
            else:
                x = checkpoint(block, x, use_reentrant=False) if recompute in (True, "full") else block(x)
        return self._logits(x) if self.last else x

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1] * self.cp.size
        if tokens > self.config.context:
            raise refuse("length of a sequence", f"at most {self.config.context}", tokens)
        where = sequence_positions(tokens, self.cp)
        if self.config.sequence_parallel:
            self.tp.divide("length of this rank's part of a sequence", ids.shape[1])
            where = where.chunk(self.tp.size)[self.tp.rank]
        x: torch.Tensor = self.embedding(ids)
        if self.positions:
            positions: torch.Tensor = self.positions.weight
            if self.config.sequence_parallel:
                positions = copy_to(positions, self.tp)
            x = x + positions[where.to(x.device)]
        out: torch.Tensor = self.dropout(x)
        return out

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if not self.config.tied:
            logits: torch.Tensor = self.head(x)
            return logits
        weight = self.embedding.weight
        linear = partial(F.linear, weight=weight)
        return enter_linear(x, [linear], [weight], self.tp, self.config.sequence_parallel)[0]


class TransformerBlock(nn.Module):
    """A pre-norm transformer layer: (B, S, H) → (B, S, H)."""

    def __init__(self, config: GPTConfig, grid: Grid, layer: int) -> None:
        super().__init__()
        hidden, tp, sp = config.hidden, grid.tp, config.sequence_parallel
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
            recompute=config.recompute == "selective",
            cp=grid.cp,
            context_parallel=config.context_parallel,
        )
        self.norm_2 = norm(config, tp)
        inner = config.inner or 4 * hidden
        options = MLPOptions(activation=config.activation, gated=config.gated, bias=config.bias, sequence_parallel=sp)
        self.mlp: nn.Module
        if config.experts and (layer + 1) % config.experts_every == 0:
            k, capacity, balance = config.top_k, config.capacity_factor, config.balance
            self.mlp = Experts(
                hidden, inner, config.experts, grid, top_k=k, capacity_factor=capacity, balance=balance, **options
            )
        else:
            self.mlp = ParallelMLP(hidden, inner, tp, **options)
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
