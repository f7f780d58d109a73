"""A small GPT of parallel layers, cut into stages for a pipeline.

A rank of the pipeline has a list of chunks: chunk c of rank r is stage c · p + r of the model. Every layout starts from
the same full model, since each weight is drawn from the seed and its name, and then cut. Names are those of the full
model, so that the parameters of all stages together are its parameters.
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
from ringcomm.parallel.functional import copy_to
from ringcomm.parallel.grid import Axis, Grid
from ringcomm.parallel.layout import cut, full_shape, splits
from ringcomm.parallel.loss import vocab_parallel_cross_entropy
from ringcomm.parallel.seed import mixed
from ringcomm.parallel.tensor import (
    ParallelAttention,
    ParallelMLP,
    SplitDropout,
    SplitLayerNorm,
    VocabParallelEmbedding,
    enter,
)

__all__ = ["GPTConfig", "GPTStage", "gpt_loss", "gpt_stages", "gpt_tied"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, and how it computes.

    Attributes:
        vocabulary: how many tokens there are
        context: the most tokens of a sequence
        layers, hidden, heads: transformer layers; numbers a token; attention heads
        kv_heads: heads of keys and values, fewer for grouped queries; None for as many as `heads`
        dropout: the share of embeddings, attention weights and residual branches that is dropped
        tied: the output has the weights of the embedding
        sequence_parallel: norms and dropout are split along the sequence, which must be a multiple of tp
        recompute: a layer's activations are not kept, but computed again in backward (Chen et al., arXiv 1604.06174)
    """

    vocabulary: int
    context: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    dropout: float = 0.0
    tied: bool = True
    sequence_parallel: bool = False
    recompute: bool = False


def gpt_stages(config: GPTConfig, grid: Grid, *, chunks: int = 1, seed: int = 0) -> list["GPTStage"]:
    """Return this rank's chunks of the model: `chunks` stages of equally many layers each.

    Raises:
        ArgumentError: the layers, heads or hidden size cannot be shared evenly.
    """
    pp, stages = grid.pp, grid.pp.size * chunks
    if config.layers % stages:
        raise refuse("layers", f"a multiple of pp {pp.size} · chunks {chunks} = {stages}", config.layers)
    share = config.layers // stages
    made = []
    for stage in range(pp.rank, stages, pp.size):
        layers = range(stage * share, (stage + 1) * share)
        made.append(GPTStage(config, grid.tp, layers, first=stage == 0, last=stage == stages - 1))
        draw(made[-1], config, grid.tp, seed)
    if config.tied and pp.size == 1:
        made[-1].embedding = made[0].embedding
    return made


def gpt_tied(stages: Sequence["GPTStage"], grid: Grid) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Return the weights that the first and the last stage share, with the group that sums their gradients."""
    shared = (stage for stage in stages if stage.config.tied and (stage.first or stage.last))
    return [(stage.embedding.weight, grid.ends.group) for stage in shared] if grid.pp.size > 1 else []


def gpt_loss(config: GPTConfig, grid: Grid) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function that compares the logits of the last stage, (B, S, share), with the next tokens, (B, S)."""
    return partial(vocab_parallel_cross_entropy, tp=grid.tp, vocabulary=config.vocabulary)


class GPTStage(nn.Module):
    """Some layers of a GPT: (B, S, H) → (B, S, H), with S/t tokens in place of S if they are split.

    The first stage takes ids, (B, S); the last returns logits, (B, S, share of the vocabulary).
    """

    def __init__(self, config: GPTConfig, tp: Axis, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.tp, self.first, self.last = config, tp, first, last
        split = config.sequence_parallel
        vocabulary = partial(VocabParallelEmbedding, config.vocabulary, config.hidden, tp, sequence_parallel=split)
        if first or (last and config.tied):
            self.embedding = vocabulary()
        if first:
            self.positions = nn.Embedding(config.context, config.hidden)
            self.dropout = dropout(config, tp)
        self.blocks = nn.ModuleDict({str(layer): Block(config, tp) for layer in layers})
        if last:
            self.norm = norm(config, tp)
            if not config.tied:
                self.head = vocabulary()
        self.copies = {"embedding.weight"} if last and config.tied and not first else set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self._embed(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.config.recompute and self.training else block(x)
        return self._logits(x) if self.last else x

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        if tokens > self.config.context:
            raise refuse("the tokens of a sequence", f"at most {self.config.context}", tokens)
        positions: torch.Tensor = self.positions.weight
        start = 0
        if self.config.sequence_parallel:
            tokens = self.tp.share("the tokens of a sequence", tokens)
            start = self.tp.rank * tokens
            positions = copy_to(positions, self.tp)
        x: torch.Tensor = self.dropout(self.embedding(ids) + positions[start : start + tokens])
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embedding if self.config.tied else self.head
        return F.linear(enter(self.norm(x), self.tp, self.config.sequence_parallel), rows.weight)


class Block(nn.Module):
    """A transformer layer, with the norms in front: (B, S, H) → (B, S, H)."""

    def __init__(self, config: GPTConfig, tp: Axis) -> None:
        super().__init__()
        hidden, split = config.hidden, config.sequence_parallel
        self.norm_1 = norm(config, tp)
        self.attention = ParallelAttention(
            hidden, config.heads, tp, kv_heads=config.kv_heads, dropout=config.dropout, sequence_parallel=split
        )
        self.norm_2 = norm(config, tp)
        self.mlp = ParallelMLP(hidden, 4 * hidden, tp, sequence_parallel=split)
        self.dropout = dropout(config, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return y


def norm(config: GPTConfig, tp: Axis) -> nn.LayerNorm:
    return SplitLayerNorm(config.hidden, tp) if config.sequence_parallel else nn.LayerNorm(config.hidden)


def dropout(config: GPTConfig, tp: Axis) -> nn.Dropout:
    return SplitDropout(config.dropout, tp) if config.sequence_parallel else nn.Dropout(config.dropout)


def draw(stage: GPTStage, config: GPTConfig, tp: Axis, seed: int) -> None:
    """Set all weights as GPT-2 does: matrices from a normal distribution of width 0.02, biases zero.

    What ends a residual branch is narrower by √(2 · layers), since so many of them add up.
    """
    found = splits(stage)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                width = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                generator = torch.Generator().manual_seed(mixed(seed, name))
                full = torch.empty(full_shape(parameter, found.get(name)), dtype=parameter.dtype)
                full.normal_(0, width, generator=generator)
                parameter.copy_(cut(full, found[name], tp) if name in found else full)
